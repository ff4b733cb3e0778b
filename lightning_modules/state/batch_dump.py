"""Write a scored batch to disk and read it back, to repeat an update that went wrong."""

from __future__ import annotations

from pathlib import Path

from datamodules.common.files import write_whole
from datamodules.common.wire import WireError, from_bytes, to_bytes
from datamodules.types import StepBatch


def dump_batch(batch: StepBatch, path: Path) -> Path:
    """Save `batch` with its media, every field of it; what is neither number, text nor array becomes text."""
    write_whole(path, to_bytes(batch, other=str))
    return path


def load_batch(path: Path) -> StepBatch:
    """Read what `dump_batch` wrote.

    Raises:
        WireError: the file is damaged, or something else.
    """
    batch = from_bytes(bytearray(path.read_bytes()))
    if not isinstance(batch, StepBatch):
        raise WireError(f"{path} holds no batch")
    return batch
