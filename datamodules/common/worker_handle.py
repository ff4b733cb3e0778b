"""One killable process as the process that started it sees it: start, ask with a deadline, kill."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from datamodules.common.places import ROOT
from datamodules.common.wire import Packed, WireError, pack, unpack
from datamodules.common.worker import receive, send

FOLDER = "worker-"


class WorkerError(RuntimeError):
    """A request has no result; the kinds below say why."""


class WorkerRaised(WorkerError):
    """The function raised; `kind` is the name of the exception's type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message or kind)
        self.kind = kind


class WorkerTimeout(WorkerError):
    """The deadline passed; the worker was killed."""


class WorkerDied(WorkerError):
    """The worker ended by itself."""

    def __init__(self, code: int | None, why: object) -> None:
        super().__init__(f"exit code {code}, {why}")
        self.code = code


class WorkerBroken(WorkerError):
    """No worker can start."""


class PoolClosed(WorkerError):
    """The pool was closed before the request was done."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker may do, and how long it may take to get ready."""

    start_s: float = 300.0
    """Seconds until it is ready: it imports its libraries, on a busy machine that takes a while."""
    memory_bytes: int | None = None
    """Its address space; a request that needs more raises MemoryError in it. None = no limit."""
    private: bool = False
    """It sees only the harmless part of the environment, and a temporary folder of its own that is removed with it."""
    max_reply_bytes: int | None = None
    """A longer reply, or one with arrays, counts as a death: for workers that handle hostile text. None = no limit."""
    only: tuple[type, ...] | None = None
    """Dataclasses that a reply may hold; None = those of the project."""


@dataclass(frozen=True)
class Reply:
    """The result of one request."""

    value: Any
    num_bytes: int
    """Memory of its arrays: a private, writable mapping that is freed with them."""
    seconds: float
    """Between sending the request and the end of the reply."""


class Worker:
    """One process and the socket to it.

    Args:
        build: pickled callable without arguments that returns the function to serve.
        options: see there.
    """

    def __init__(self, build: bytes, options: WorkerOptions) -> None:
        self.options, self.served = options, 0
        self.folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-") if options.private else None
        kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
        environment = {k: v for k, v in os.environ.items() if not options.private or k in kept}
        paths = dict.fromkeys([str(ROOT), *(path for path in sys.path if path)])
        # No accelerator is needed, and a worker must not hold memory of one.
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if self.folder:
            environment |= {"TMPDIR": self.folder, "PYTHONDONTWRITEBYTECODE": "1"}
        self.socket, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", "datamodules.common.worker", str(descriptor), str(os.getpid())]
        self.process = subprocess.Popen(
            command, pass_fds=[descriptor], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._build = build

    def wait_ready(self) -> None:
        """Return when it can take work. Raises WorkerBroken, WorkerTimeout or WorkerDied."""
        match self._exchange(pack([self.options.memory_bytes, self._build]), self.options.start_s).value:
            case ["ready"]:
                return
            case ["raised", kind, message]:
                raise WorkerBroken(f"{kind}: {message}")
        raise WorkerDied(self.kill(), "unreadable reply")

    def ask(self, payload: Packed, deadline_s: float) -> Reply:
        """The result of one request. Raises WorkerRaised, WorkerTimeout or WorkerDied."""
        self.served += 1
        reply = self._exchange(payload, deadline_s)
        match reply.value:
            case ["done", value]:
                return Reply(value, reply.num_bytes, reply.seconds)
            case ["raised", str(kind), str(message)]:
                raise WorkerRaised(kind, message)
        raise WorkerDied(self.kill(), "unreadable reply")

    def _exchange(self, payload: Packed, deadline_s: float) -> Reply:
        began = time.monotonic()
        try:
            self.socket.settimeout(deadline_s)
            send(self.socket, payload)
            text, memory = receive(self.socket, began + deadline_s, self.options.max_reply_bytes)
            value = unpack(text, memory, self.options.only)
        except TimeoutError:
            raise WorkerTimeout(f"took longer than {deadline_s:g} s and was stopped") from None
        except (OSError, WireError) as error:
            raise WorkerDied(self.kill(), error) from None
        return Reply(value, 0 if memory is None else len(memory), time.monotonic() - began)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def kill(self) -> int:
        """End it with everything it started; its exit code, which is its own when it had ended before."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        return code


class Starter(threading.Thread):
    """Starts processes. The kernel ends a worker with the thread that started it, so this one never ends."""

    def __init__(self) -> None:
        super().__init__(name="worker-starter", daemon=True)
        self._requests: queue.SimpleQueue[tuple[Callable[[], Worker], Future[Worker]]] = queue.SimpleQueue()
        self.start()

    def make(self, start: Callable[[], Worker]) -> Worker:
        """Call `start` in the thread."""
        future: Future[Worker] = Future()
        self._requests.put((start, future))
        return future.result()

    def run(self) -> None:
        """Serve for as long as the process lives."""
        while True:
            start, future = self._requests.get()
            try:
                future.set_result(start())
            except OSError as error:
                future.set_exception(error)


@lru_cache(maxsize=1)
def starter(_pid: int) -> Starter:
    """The starter of this process; a fork has none of its parent's threads."""
    return Starter()


def sweep() -> None:
    """Remove temporary folders of workers whose parent was killed before it could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        owner = folder.name[len(FOLDER) :].split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
