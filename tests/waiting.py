"""Waiting for an event instead of for a time: what a test waits for may take as long as a busy machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

GENEROUS_S = 120.0
"""Longer than anything here takes on the slowest machine: only a fault runs into it."""


def until(condition: Callable[[], object], what: str, timeout_s: float = GENEROUS_S) -> None:
    """Block until `condition()` is true; fails with `what` when that does not come within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.02)


def running(process: int | psutil.Process) -> bool:
    """Whether a process, or the process of an id, has not ended (a zombie has)."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(processes: Iterable[int | psutil.Process]) -> None:
    """Block until none of these processes runs; fails with the ids of those that stay behind."""
    left = list(processes)

    def none_left() -> bool:
        left[:] = [process for process in left if running(process)]
        return not left

    until(none_left, f"the end of processes {left}")


def file_exists(path: Path) -> None:
    """Block until the file is there: how one process tells a test how far it has come."""
    until(path.is_file, f"the file {path}")
