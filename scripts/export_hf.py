"""Write a run as a Hugging Face folder: `python scripts/export_hf.py RUN_DIR [step=N] [dtype=bfloat16]`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_modules.launch.config import ConfigError, nearest
from lightning_modules.launch.console import configure_logging
from lightning_modules.launch.runs import export_run

log = logging.getLogger("export")
OPTIONS = ("step", "dtype", "target")


def main(arguments: list[str]) -> int:
    """Parse, export, say where; returns the exit code."""
    configure_logging()
    try:
        runs = [a for a in arguments if "=" not in a]
        options = dict(a.split("=", 1) for a in arguments if "=" in a)
        unknown = sorted(set(options) - set(OPTIONS))
        if len(runs) != 1:
            raise ConfigError("usage: python scripts/export_hf.py RUN_DIR [step=N] [dtype=bfloat16] [target=DIR]")
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]}{nearest(unknown[0], OPTIONS)}")
        step = int(options["step"]) if "step" in options else None
        target = Path(options["target"]) if "target" in options else None
        print(export_run(Path(runs[0]), step, options.get("dtype"), target))
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
