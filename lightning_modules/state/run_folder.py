"""What a run folder holds: its state and its checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from datamodules.common.files import write_json

STATUS_FILE = "status.json"
CHECKPOINT_DIR = "checkpoints"
STATE_FILE = "trainer.json"
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


def read_status(run_dir: Path) -> dict[str, Any]:
    """Last recorded state of a run: {} when it never started."""
    path = run_dir / STATUS_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def write_status(run_dir: Path, state: str, **fields: Any) -> None:
    """Record running | stopped | finished | failed, with the step and whatever else is known."""
    write_json(run_dir / STATUS_FILE, {**read_status(run_dir), "state": state, **fields}, sort_keys=True, default=str)
