"""What `evaluate.py` does with its command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modules.launch.config import ConfigError, nearest
from lightning_modules.launch.pipeline import in_stage
from lightning_modules.launch.processes import INTERRUPTED, die_with_parent
from lightning_modules.launch.training import configure_logging

log = logging.getLogger("evaluate")

HELP = """usage: python evaluate.py run=RUN_DIR

  run=RUN_DIR   answer the run's held-out split greedily with its newest checkpoint and print accuracy per task
"""


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    if in_stage():
        die_with_parent()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    configure_logging()
    if not arguments or set(arguments) & {"-h", "--help"}:
        sys.stdout.write(HELP)
        return 0 if arguments else 2
    try:
        options = dict(argument.partition("=")[::2] for argument in arguments)
        unknown = sorted(set(options) - {"run"})
        if unknown:
            raise ConfigError(f"unknown option '{unknown[0]}'{nearest(unknown[0], ['run'])}")
        from lightning_modules.launch.held_out import evaluate_run

        evaluate_run(Path(options["run"]))
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
