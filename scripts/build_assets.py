"""Build what a tiny experiment starts from: `python scripts/build_assets.py experiment=tiny_cpu [seed=0]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_modules.launch.assets import main

if __name__ == "__main__":
    sys.exit(main())
