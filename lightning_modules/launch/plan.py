"""Which folder a run works in and which checkpoint it continues from, decided once, before anything is built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.common.files import FolderInUse, FolderLock
from lightning_modules.launch.config import ConfigError
from lightning_modules.launch.identity import default_run_dir, similar_run
from lightning_modules.state.run_folder import STATE_FILE, STATUS_FILE, checkpoint_steps

if TYPE_CHECKING:
    from omegaconf import DictConfig

_locks: list[FolderLock] = []
"""Locks of this process, held until it ends."""


@dataclass(frozen=True)
class RunPlan:
    """What this process is going to do."""

    run_dir: Path
    checkpoint: Path | None
    """Checkpoint to continue from; None = from the start."""
    start_step: int
    note: str
    """One sentence for the console."""


def plan_run(config: DictConfig) -> RunPlan:
    """Decide folder and checkpoint from `resume=auto|never|PATH` and what lies on the disk.

    auto continues the newest complete checkpoint of the same settings; never opens a new folder beside an old one;
    PATH (a checkpoint or a run folder) continues from there, in its own folder when it is that run's newest.

    Raises:
        ConfigError: PATH holds no complete checkpoint.
    """
    run_dir = Path(config.run_dir) if config.get("run_dir") else default_run_dir(config)
    resume = str(config.resume)
    existing = checkpoint_steps(run_dir)
    if resume == "never":
        run_dir = run_dir if not _used(run_dir) else _fresh_sibling(run_dir)
        return RunPlan(run_dir, None, 0, f"starting in {run_dir}")
    if resume == "auto":
        if not existing:
            similar = "" if _used(run_dir) else similar_run(config, run_dir)
            return RunPlan(run_dir, None, 0, f"starting in {run_dir}" + (f"; {similar}" if similar else ""))
        step, path = list(existing.items())[-1]
        return RunPlan(run_dir, path, step, f"continuing {run_dir} after step {step} (resume=never starts anew)")
    step, path = _resolve(Path(resume))
    if existing and existing.get(max(existing)) != path:
        run_dir = _fresh_sibling(run_dir)
    return RunPlan(run_dir, path, step, f"continuing {path} (step {step}) in {run_dir}")


def _resolve(path: Path) -> tuple[int, Path]:
    path = path.resolve()
    if (path / STATE_FILE).is_file():
        return int(json.loads((path / STATE_FILE).read_text())["rl_step"]), path
    steps = checkpoint_steps(path)
    if not steps:
        raise ConfigError(f"resume={path}: no complete checkpoint there; give a run folder or its checkpoints/step_N")
    step, newest = list(steps.items())[-1]
    return step, newest


def _used(run_dir: Path) -> bool:
    return (run_dir / STATUS_FILE).is_file() or bool(checkpoint_steps(run_dir))


def _fresh_sibling(run_dir: Path) -> Path:
    number = 2
    while _used(run_dir.with_name(f"{run_dir.name}-{number}")):
        number += 1
    return run_dir.with_name(f"{run_dir.name}-{number}")


def lock_run(run_dir: Path) -> None:
    """Keep other processes out of the run folder until this one ends, however it ends.

    Raises:
        ConfigError: another process is training there; two would overwrite each other's checkpoints.
    """
    try:
        # Loader workers of a killed run hold its lock for the moment that they take to notice.
        _locks.append(FolderLock(run_dir, wait_s=5.0))
    except FolderInUse as error:
        raise ConfigError(f"{error}, or a run_name of its own") from None
