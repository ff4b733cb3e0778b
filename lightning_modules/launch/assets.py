"""Build the model and data that an experiment names under `assets`: the first stage of the tiny experiments."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from datamodules.common.processes import die_with_parent
from lightning_modules.launch.config import ConfigError, build, compose
from lightning_modules.launch.console import configure_logging

log = logging.getLogger("assets")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; takes overrides as `train.py` does and returns the exit code."""
    die_with_parent()
    configure_logging()
    try:
        config = compose("train", sys.argv[1:] if arguments is None else arguments)
        if not config.assets:
            raise ConfigError(f"{config.name} builds no assets: its configuration has none under assets")
        for folder in build(config.assets):
            log.info("built or found: %s", folder)
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
