"""Evaluate a model on benchmarks, `python evaluate.py model=PATH benchmark=[videomme,lvbench] data_root=DIR`.

`python evaluate.py run=RUN_DIR` answers a training run's held-out split with its newest checkpoint.
"""

from __future__ import annotations

import sys

from lightning_modules.launch.evaluate_cli import main

if __name__ == "__main__":
    sys.exit(main())
