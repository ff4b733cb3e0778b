"""A pool of killable processes for judgements that may be slow or hostile.

Every worker is a fresh interpreter (`rewards.worker`) that serves one judgement at a time. A judgement over its time
limit costs its own verdict only: the worker is killed with everything it started and replaced. No signals are used
inside the workers, so the pool works from any thread. Workers die with this process even after SIGKILL.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from rewards.base import Query, TaskReward, Verdict

log = logging.getLogger(__name__)
_HEADER = struct.Struct("!I")
_MAX_REPLY = 1 << 20
_FOLDER = "reward-pool-"
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Job:
    name: str
    query: Query
    answer: str
    limit: float
    future: Future[Verdict]


def _sweep() -> None:
    """Remove temporary folders of pools whose process was killed before it could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        owner = folder.name[len(_FOLDER) :].split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class _Died(Exception):
    """The worker closed its pipe."""


class _Child:
    """One worker process and its two pipes."""

    def __init__(self, tasks: bytes, memory_mb: int) -> None:
        environment = {k: os.environ[k] for k in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if k in os.environ}
        self.folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
        environment["TMPDIR"] = self.folder
        paths = dict.fromkeys([str(_ROOT), *(p for p in sys.path if p)])
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewards.worker", str(os.getpid()), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self.send(tasks)

    def send(self, payload: bytes) -> None:
        """Write one frame."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(_HEADER.pack(len(payload)))
            view = memoryview(payload)
            while view:
                view = view[stdin.write(view) or 0 :]
        except (OSError, ValueError) as error:  # ValueError: closed by `ScoringPool.close` in the meantime
            raise _Died(str(error)) from error

    def receive(self, deadline: float) -> bytes | None:
        """One frame, or None when the deadline (monotonic seconds) passes first."""
        head = self._read(_HEADER.size, deadline)
        if head is None:
            return None
        (size,) = _HEADER.unpack(head)
        if size > _MAX_REPLY:
            raise _Died(f"reply of {size} bytes")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes | None:
        stdout = self.process.stdout
        assert stdout is not None
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            try:
                if left <= 0 or not select.select([stdout], [], [], left)[0]:
                    return None
                chunk = os.read(stdout.fileno(), size - len(data))
            except (OSError, ValueError) as error:  # ValueError: closed by `ScoringPool.close` in the meantime
                raise _Died(str(error)) from error
            if not chunk:
                raise _Died("pipe closed")
            data += chunk
        return data

    def kill(self) -> None:
        """Kill the worker with its process group; sandboxes below it die with it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ScoringPool:
    """Runs `task.judge` in worker processes.

    Args:
        tasks: task types by name; copied into every worker.
        workers: number of processes.
        memory_mb: address space of a worker in MiB; a judgement that needs more ends with status "error".
        start_seconds: time a worker may take to import its libraries.
    """

    def __init__(
        self, tasks: Mapping[str, TaskReward], workers: int = 2, memory_mb: int = 4096, start_seconds: float = 120.0
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: the pool needs at least one process")
        _sweep()
        self._tasks = pickle.dumps(dict(tasks))
        self._memory_mb, self._start_seconds = memory_mb, start_seconds
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._children: dict[int, _Child] = {}
        self._closed = threading.Event()
        # A worker is tied to the thread that starts it (parent-death signals are per thread), so each has its own.
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"reward-pool-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._closed, self._jobs, self._threads, self._children)

    def submit(self, name: str, query: Query, answer: str, limit: float) -> Future[Verdict]:
        """Judge `answer` with task `name` within `limit` seconds; the future never raises."""
        if self._closed.is_set():
            raise RuntimeError("the scoring pool is closed")
        future: Future[Verdict] = Future()
        self._jobs.put(_Job(name, query, answer, limit, future))
        return future

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [child.process.pid for child in list(self._children.values())]

    def close(self) -> None:
        """Kill the workers; unfinished judgements end with status "error"."""
        self._finalizer()

    def _serve(self, slot: int) -> None:
        child: _Child | None = None
        while not self._closed.is_set():
            if child is None:
                child = self._start(slot)
            job = self._jobs.get()
            if job is None:
                break
            if not job.future.set_running_or_notify_cancel():
                continue
            if child is None or child.process.poll() is not None:
                if child is not None:
                    self._stop(slot, child)
                child = self._start(slot)
            verdict, healthy = self._judge(child, job)
            if not healthy and child is not None:
                self._stop(slot, child)
            job.future.set_result(verdict)
            if not healthy:
                child = self._start(slot) if not self._closed.is_set() else None
        if child is not None:
            self._stop(slot, child)

    def _start(self, slot: int) -> _Child | None:
        """A worker that has said it is ready, or None with the reason logged."""
        child = None
        try:
            child = _Child(self._tasks, self._memory_mb)
            self._children[slot] = child
            # `close` sets the flag before it looks for children: one of the two sees this child.
            if not self._closed.is_set() and child.receive(time.monotonic() + self._start_seconds) is not None:
                return child
            reason = f"was not ready after {self._start_seconds:.0f} s"
        except (OSError, _Died) as error:
            reason = f"did not start: {error}"
        if not self._closed.is_set():
            log.error("a scoring process %s", reason)
        if child is not None:
            child.kill()
        self._children.pop(slot, None)
        return None

    def _stop(self, slot: int, child: _Child) -> None:
        child.kill()
        self._children.pop(slot, None)

    def _judge(self, child: _Child | None, job: _Job) -> tuple[Verdict, bool]:
        """The verdict, and whether the worker can go on."""
        if child is None:
            return Verdict(0.0, "error", "the scoring process could not be started; see the log"), False
        try:
            payload = json.dumps(
                {"name": job.name, "answer": job.answer, "query": asdict(job.query)}, default=str, skipkeys=True
            ).encode()
        except Exception as error:  # noqa: BLE001 - whatever a record holds: its answer waits for a verdict
            return Verdict(0.0, "error", f"the record is no JSON: {type(error).__name__}: {error}"[:500]), True
        try:
            child.send(payload)
            reply = child.receive(time.monotonic() + job.limit)
        except _Died as error:
            code = child.process.wait()
            return Verdict(0.0, "error", f"the scoring process died (exit status {code}, {error})"), False
        if reply is None:
            return Verdict(0.0, "timeout", f"judging took longer than {job.limit:g} s"), False
        try:
            fields = json.loads(reply)
            return Verdict(fields["accuracy"], fields["status"], fields["reason"], fields["parts"]), True
        except (ValueError, KeyError, TypeError) as error:
            return Verdict(0.0, "error", f"unreadable reply of the scoring process: {error!r}"[:500]), False


def _shut_down(
    closed: threading.Event,
    jobs: queue.SimpleQueue[_Job | None],
    threads: list[threading.Thread],
    children: dict[int, _Child],
) -> None:
    closed.set()
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
        if job is not None and job.future.set_running_or_notify_cancel():
            job.future.set_result(Verdict(0.0, "error", "the scoring pool was closed"))
    for _ in threads:
        jobs.put(None)
    for child in list(children.values()):
        child.kill()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
