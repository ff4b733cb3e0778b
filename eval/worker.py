"""The inside of a preparation process: takes payloads, returns values through anonymous memory."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

READY, DONE, BROKEN = "ready", "done", "broken"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Reply:
    """What a process says."""

    kind: str
    """READY: it can take work; DONE: a payload is finished; BROKEN: it cannot start."""
    value: Any = None
    reason: str = ""
    seconds: float = 0.0
    """Spent on the payload."""
    num_bytes: int = 0
    """Size of the value's arrays."""


def work(connection: Any, build: Callable[[], Callable[[Any], Any]]) -> None:
    """Main function of a process: serve until the other side closes the connection."""
    _die_with_evaluation()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the evaluation's business
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        prepare = build()
    except Exception as error:  # noqa: BLE001 - the evaluation must hear why, whatever it is
        send(connection, Reply(BROKEN, reason=f"{type(error).__name__}: {error}"))
        return
    send(connection, Reply(READY))
    while True:
        try:
            payload = connection.recv()
        except EOFError:
            return
        started = time.monotonic()
        try:
            value, reason = prepare(payload), ""
        except Exception as error:  # noqa: BLE001 - user media: whatever they do to a decoder becomes the item's state
            value, reason = None, str(error) or type(error).__name__
        send(connection, Reply(DONE, value, reason, time.monotonic() - started))


def _die_with_evaluation() -> None:
    """End with the evaluation, however it ends, also inside a decoder that hangs."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True, name="parent-watch").start()
    if sys.platform.startswith("linux"):
        # For code that never lets the thread above run: the kernel kills us when the fork server ends, and that ends
        # with the evaluation once no child holds this pipe open.
        from multiprocessing import forkserver

        descriptor = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
        if descriptor is not None:
            os.close(descriptor)
            forkserver._forkserver._forkserver_alive_fd = None
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def send(connection: Any, reply: Reply) -> None:
    """Send a reply; its arrays travel in a memory file whose descriptor is passed on."""
    from multiprocessing.reduction import send_handle

    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(reply.value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = (reply.kind, reply.reason, reply.seconds, [view.nbytes for view in views])
    descriptor = os.memfd_create("prepared") if views else -1
    try:
        for view in views:
            _write(descriptor, view)
        connection.send((head, body))
        if views:
            send_handle(connection, descriptor, None)
    finally:
        if views:
            os.close(descriptor)


def receive(connection: Any) -> Reply:
    """The next reply; its arrays lie in a private mapping that is freed with them.

    Raises:
        EOFError, OSError: the process is gone.
    """
    from multiprocessing.reduction import recv_handle

    (kind, reason, seconds, sizes), body = connection.recv()
    if not sizes:
        return Reply(kind, pickle.loads(body), reason, seconds)
    descriptor = recv_handle(connection)
    try:
        memory = memoryview(mmap.mmap(descriptor, sum(sizes), access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
    parts, start = [], 0
    for size in sizes:
        parts.append(memory[start : start + size])
        start += size
    return Reply(kind, pickle.loads(body, buffers=parts), reason, seconds, sum(sizes))


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
