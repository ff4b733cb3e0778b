"""Frame arrays that cross process borders as references instead of copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class SharedFrames(np.ndarray):
    """uint8 frames that pickle cheaply: a memory-mapped file as its path, other memory as shared memory.

    DataLoader workers hand these to the trainer; the bytes themselves are never sent through a pipe. Behaves as an
    ordinary array otherwise.
    """

    source: tuple[str, int] | None = None
    """(file, byte offset) of a memory map, or None for ordinary memory."""

    def __array_finalize__(self, other: object) -> None:
        # Views and results of arithmetic are not the file any more.
        self.source = None

    def __reduce__(self) -> tuple:
        if self.source is not None:
            return map_file, (*self.source, self.shape)
        import torch

        # torch registers a reducer with multiprocessing that moves the storage to shared memory.
        return _from_tensor, (torch.from_numpy(np.ascontiguousarray(self).view(np.ndarray)),)


def map_file(path: str | Path, offset: int, shape: tuple[int, ...]) -> SharedFrames:
    """Memory-map uint8 frames of a file; writes stay private to the process."""
    frames = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=tuple(shape)).view(SharedFrames)
    frames.source = (str(path), offset)
    return frames


def share(frames: np.ndarray) -> SharedFrames:
    """Wrap an array that lives in ordinary memory."""
    return frames.view(SharedFrames)


def _from_tensor(tensor: torch.Tensor) -> SharedFrames:
    return tensor.numpy().view(SharedFrames)
