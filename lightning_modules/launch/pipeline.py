"""Run an experiment's stages one after the other, each in a process of its own, as one story on the console."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_modules.launch.config import ROOT, ConfigError
from lightning_modules.launch.processes import INTERRUPTED, ChildRun

log = logging.getLogger("pipeline")

STAGE_ENV = "EVR1_STAGE"
"""Set in the processes of a pipeline; holds "2/5" and keeps a stage from starting the pipeline again."""


@dataclass(frozen=True)
class Stage:
    """One step of an experiment."""

    name: str
    """Shown to the user."""
    script: str
    """Python script, relative to the repository."""
    overrides: tuple[str, ...] = ()
    """Its command-line overrides."""
    inherit: bool = False
    """Whether the user's own overrides are passed on, in front of `overrides`."""


def parse_stages(items: Sequence[dict]) -> list[Stage]:
    """Stages of a config's `stages` list.

    Raises:
        ConfigError: an entry has an unknown field or a script that does not exist.
    """
    stages = []
    for item in items:
        try:
            stage = Stage(**{**item, "overrides": tuple(item.get("overrides", ()))})
        except TypeError as error:
            raise ConfigError(f"stages: {item} is not a stage ({error})") from error
        if not (ROOT / stage.script).is_file():
            raise ConfigError(f"stages: script {stage.script} of stage {stage.name!r} does not exist")
        stages.append(stage)
    return stages


def run_pipeline(stages: Sequence[Stage], user_overrides: Sequence[str]) -> int:
    """Run the stages; the first one that fails or is stopped ends the pipeline with its exit code."""
    for number, stage in enumerate(stages, 1):
        label = f"{number}/{len(stages)}"
        log.info("[%s] %s", label, stage.name)
        started = time.monotonic()
        overrides = [*(user_overrides if stage.inherit else ()), *stage.overrides]
        child = ChildRun([sys.executable, str(ROOT / stage.script), *overrides], env={**os.environ, STAGE_ENV: label})
        code = child.wait()
        if code != 0:
            if code == INTERRUPTED or child.was_interrupted:
                log.info("[%s] stopped; the same command continues here", label)
                return INTERRUPTED
            log.error("[%s] %s failed with exit code %d", label, stage.name, code)
            return code
        log.info("[%s] done in %.0f s", label, time.monotonic() - started)
    return 0


def in_stage() -> bool:
    """Whether this process is a stage of a pipeline."""
    return STAGE_ENV in os.environ
