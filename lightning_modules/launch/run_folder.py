"""One folder per run: where it lies, what state it is in, and which checkpoint the next process continues from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.files import FolderInUse, FolderLock, write_json
from lightning_modules.launch.config import ConfigError, default_run_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

STATUS_FILE = "status.json"
CHECKPOINT_DIR = "checkpoints"
STATE_FILE = "trainer.json"
_locks: list[FolderLock] = []
"""Locks of this process, held until it ends."""
_STEP = re.compile(r"step_(\d{8})$")


def checkpoint_steps(run_dir: Path) -> dict[int, Path]:
    """Complete checkpoints of a run by step; unfinished ones (no state file, temporary name) do not count."""
    folder = run_dir / CHECKPOINT_DIR
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.match(path.name)
        if match and (path / STATE_FILE).is_file():
            found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint taken after `step` RL steps."""
    return run_dir / CHECKPOINT_DIR / f"step_{step:08d}"


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
            return RunPlan(run_dir, None, 0, f"starting in {run_dir}")
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


def read_status(run_dir: Path) -> dict[str, Any]:
    """Last recorded state of a run: {} when it never started."""
    path = run_dir / STATUS_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def write_status(run_dir: Path, state: str, **fields: Any) -> None:
    """Record running | stopped | finished | failed, with the step and whatever else is known."""
    write_json(run_dir / STATUS_FILE, {**read_status(run_dir), "state": state, **fields}, sort_keys=True, default=str)
