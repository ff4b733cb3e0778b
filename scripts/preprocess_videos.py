"""Decode and cache every video of an experiment: `python scripts/preprocess_videos.py experiment=NAME [key=value ...]`.

The options are those of `lightning_modules.launch.preprocess`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_modules.launch.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
