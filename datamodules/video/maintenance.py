"""Keep the cache within its size, copy clips to a faster disk, clear away what killed writers left."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from datamodules.video.entry import EntryError, read_header

logger = logging.getLogger(__name__)

IN_USE_SECONDS = 300.0
"""Clips used within this time are not evicted: another process may still be opening them."""
STALE_SECONDS = 3600.0
"""Temporary files older than this belong to writers that died."""


def entries(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """All clips under `folder` with their file state; files that vanish meanwhile are left out."""
    return list(_listed(folder, "*/*.clip"))


def _listed(folder: Path, *patterns: str) -> Iterator[tuple[Path, os.stat_result]]:
    for pattern in patterns:
        for path in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()


def used_bytes(folder: Path) -> int:
    """Size of all clips under `folder` and of those that are being written."""
    return sum(state.st_size for _, state in _listed(folder, "*/*.clip", "*/.*.tmp"))


def evict(folder: Path, max_bytes: int, protect_seconds: float = IN_USE_SECONDS) -> list[Path]:
    """Delete the least recently used clips until at most `max_bytes` are used; returns the deleted files.

    Clips used within `protect_seconds` count and stay, as do files that are being written. The time of last use is the
    file's modification time (reads update it).
    """
    found = sorted(entries(folder), key=lambda item: item[1].st_mtime)
    total = used_bytes(folder)
    removed: list[Path] = []
    limit = time.time() - protect_seconds
    for path, state in found:
        if total <= max_bytes or state.st_mtime > limit:
            break
        path.unlink(missing_ok=True)
        total -= state.st_size
        removed.append(path)
    return removed


def clear_stale(folder: Path, older_than: float = STALE_SECONDS) -> int:
    """Delete temporary files that killed writers left behind; returns how many."""
    stale = [path for path, state in _listed(folder, "*/.*.tmp") if state.st_mtime < time.time() - older_than]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def stage(source: Path, target: Path) -> Path:
    """Copy a clip to `target` unless the same clip is there; returns the path to read.

    A full local disk is no error: the clip is then read from `source`.

    Raises:
        FileNotFoundError: `source` does not exist.
        EntryError: its header is damaged.
    """
    wanted, size = read_header(source), source.stat().st_size
    with contextlib.suppress(FileNotFoundError, EntryError):
        # The copy has the source's header, with its checksums, and size; its frames are verified when read.
        if target.stat().st_size == size and read_header(target) == wanted:
            return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.warning("cannot stage %s (%s); reading it from %s", target, error, source.parent)
        return source
    return target
