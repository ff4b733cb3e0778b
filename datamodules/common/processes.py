"""Let a process end with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the one that started it ends, however that happens.

    Linux only, elsewhere nothing happens. The kernel watches the *thread* that started this process.

    Args:
        parent: process id of the parent, for a child that may come too late; None = whichever it is now.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)
