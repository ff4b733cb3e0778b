"""A request to stop that arrived before anybody could act on it."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_interrupted = threading.Event()


def remember_interrupt() -> None:
    """From now on a SIGINT raises KeyboardInterrupt and is remembered: raised in a destructor, Python would drop it."""

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        _interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)


def was_interrupted() -> bool:
    """Whether a SIGINT has arrived since `remember_interrupt`."""
    return _interrupted.is_set()
