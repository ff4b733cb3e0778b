"""Evaluate: `python evaluate.py run=RUN_DIR` answers a training run's held-out split with its newest checkpoint."""

from __future__ import annotations

import sys

from lightning_modules.launch.evaluate_cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
