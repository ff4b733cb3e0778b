"""Train: `python train.py experiment=tiny_cpu [group=option] [key=value ...]`.

One program in every role: it runs the stages of an experiment one after the other, or starts itself again under
torchrun when several local ranks are wanted, or is one rank. `-m` sweeps over comma-separated values, `--cfg` prints
the resolved configuration.
"""

from __future__ import annotations

import sys

from lightning_modules.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
