"""Preparation in processes that can be killed: decode or cache read, one deadline per item, bounded by bytes.

Results come back as anonymous memory files, so frames are never copied through a pipe. The processes come from a
fork server that imports the heavy libraries once; they die with the evaluation, however it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.worker import BROKEN, DONE, READY, Reply, receive, work

log = logging.getLogger(__name__)

START_SECONDS = 300.0
"""A worker imports torch and transformers; on a busy machine that takes a while."""
MAX_AHEAD_BYTES = 32768
"""A waiting task must fit into the connection's buffer: otherwise both sides could wait for each other."""
ATTEMPTS = 2
"""An item whose process dies gets one more."""

_END = object()

Prepare = Callable[[Any], Any]


@dataclass(frozen=True)
class Task:
    """One item to be prepared."""

    key: str
    payload: Any
    """What the prepare function takes; must pickle."""
    group: str = ""
    """Neighbours of one group (one video) go to one process, which has it at hand."""


@dataclass(frozen=True)
class Prepared:
    """Outcome of one task: a value, or the reason why there is none."""

    key: str
    value: Any = None
    reason: str = ""
    """Empty when `value` holds."""
    num_bytes: int = 0
    """Held until `PreparePool.release`."""


@dataclass
class PoolStats:
    """What the pool did; seconds are sums over its processes."""

    start_s: float = 0.0
    """Seconds until the first process was ready."""
    busy_s: float = 0.0
    """Seconds inside the prepare function."""
    peak_bytes: int = 0
    """Most bytes that were prepared and not released."""
    killed: int = 0
    """Processes stopped at the deadline."""
    died: int = 0
    """Processes that ended by themselves."""
    peak_processes: int = 0
    """Most tasks in preparation at one time."""


class PreparePool:
    """Prepares tasks in `processes` processes.

    Args:
        build: called once in every process; returns the function that prepares one payload. Must pickle.
        processes: how many.
        deadline_s: seconds for one item; afterwards its process is killed and the item has failed.
        max_bytes: no new item is started while prepared, unreleased items (and those about to be) would exceed it;
            one item is always let through, so that a single huge one cannot block the run.
        preload: modules that the fork server imports once for all processes.

    Raises:
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        build: Callable[[], Prepare],
        processes: int = 4,
        deadline_s: float = 300.0,
        max_bytes: int = 8 << 30,
        preload: Sequence[str] = (),
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes={processes}: at least one is needed to prepare anything")
        if deadline_s <= 0 or max_bytes <= 0:
            raise ValueError(f"deadline_s={deadline_s} and max_bytes={max_bytes} must be positive")
        self.deadline_s, self.max_bytes, self.processes = deadline_s, max_bytes, processes
        self.stats = PoolStats()
        self._build, self._preload = build, tuple(preload)
        self._outcomes: queue.Queue[Any] = queue.Queue()
        self._held: dict[str, int] = {}
        self._largest = 0
        self._failed_starts = 0
        self._began = 0.0
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stop = False
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None

    def start(self, count: int | None = None) -> None:
        """Start processes now, so that they are up when the engine is; `run` starts what is missing.

        Args:
            count: how many; None = all.
        """
        self._began = self._began or time.monotonic()
        for _ in range(min(self.processes, self.processes if count is None else count) - len(self._workers)):
            self._workers.append(_Worker(self._build, self._preload))

    def run(self, tasks: Iterable[Task]) -> Iterator[Prepared | None]:
        """Yield one outcome per task, in the order in which they are ready.

        None says that memory is full: nothing more comes before something is released.

        Raises:
            RuntimeError: the processes cannot start.
        """
        self._began = self._began or time.monotonic()
        self._thread = threading.Thread(target=self._main, args=(iter(tasks),), name="prepare-pool", daemon=True)
        self._thread.start()
        try:
            while (outcome := self._outcomes.get()) is not _END:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            self.close()

    def release(self, key: str) -> None:
        """The memory of a prepared item is free again."""
        with self._lock:
            self._held.pop(key, None)
        self._wake()

    def close(self) -> None:
        """Stop: the processes are killed, outcomes that nobody took are dropped."""
        self._stop = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        for worker in self._workers:  # started and never used
            worker.kill()
        self._workers.clear()
        with self._lock:
            if self._wake_write >= 0:
                os.close(self._wake_write)
                os.close(self._wake_read)
                self._wake_write = self._wake_read = -1

    @property
    def held_bytes(self) -> int:
        """Bytes prepared and not released."""
        with self._lock:
            return sum(self._held.values())

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
                    os.write(self._wake_write, b"x")

    def _main(self, tasks: Iterator[Task]) -> None:
        workers = self._workers
        try:
            self._pump(_Queue(tasks), workers)
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer must hear it instead of waiting forever
            self._outcomes.put(error)
        finally:
            while workers:
                workers.pop().kill()
            self._outcomes.put(_END)

    def _pump(self, tasks: _Queue, workers: list[_Worker]) -> None:
        from multiprocessing.connection import wait

        while not self._stop:
            self._dispatch(tasks, workers)
            busy = [worker for worker in workers if worker.task is not None]
            self.stats.peak_processes = max(self.stats.peak_processes, len(busy))
            if not busy:
                if tasks.empty():
                    return
                self._outcomes.put(None)
            handles = {worker.connection: worker for worker in busy}
            timeout = min((worker.deadline - time.monotonic() for worker in busy), default=None)
            ready = wait([*handles, self._wake_read], None if timeout is None else max(0.0, timeout))
            for handle in ready:
                if handle == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._collect(handles[handle], tasks, workers)
            for worker in busy:
                if worker.task is not None and worker.deadline <= time.monotonic():
                    self._expire(worker, tasks, workers)

    def _dispatch(self, tasks: _Queue, workers: list[_Worker]) -> None:
        """Give processes work while there is room; start another process while there are fewer than allowed."""
        while not tasks.empty() and self._room(workers):
            idle = [worker for worker in workers if worker.task is None]
            if not idle and len(workers) < self.processes:
                idle = [_Worker(self._build, self._preload)]
                workers += idle
            if idle:
                task, attempt, worker = tasks.take(idle)
                worker.give(task, attempt, _packed(task), self.deadline_s)
                continue
            # The next one waits inside the process, so that it need not wait for us; not at the end, where it would
            # wait behind a slow one while other processes are idle.
            short = [worker for worker in workers if worker.is_ready and len(worker.tasks) == 1]
            if not short or len(tasks) <= self.processes:
                return
            task, attempt, worker = tasks.take(short)
            data = _packed(task)
            if len(data) > MAX_AHEAD_BYTES:
                tasks.retry(task, attempt)
                return
            worker.give(task, attempt, data, self.deadline_s)

    def _room(self, workers: list[_Worker]) -> bool:
        busy = sum(len(worker.tasks) for worker in workers)
        held = self.held_bytes
        if not self._largest and busy >= self.processes:
            return False  # until the first item has shown a size, none waits inside a process
        return (not busy and not held) or held + (busy + 1) * self._largest <= self.max_bytes

    def _collect(self, worker: _Worker, tasks: _Queue, workers: list[_Worker]) -> None:
        task, attempt = worker.tasks[0]
        try:
            reply = receive(worker.connection)
        except (EOFError, OSError) as error:
            self._remove(worker, tasks, workers)
            self.stats.died += 1
            self._failed_starts += not worker.is_ready
            if self._failed_starts > ATTEMPTS:
                raise RuntimeError(
                    f"preparation processes end while they start (exit code {worker.process.exitcode})"
                ) from error
            if attempt < ATTEMPTS:
                tasks.retry(task, attempt + 1)
            else:
                code = worker.process.exitcode
                reason = f"the preparation process died {ATTEMPTS} times (exit code {code})"
                self._finish(Prepared(task.key, reason=reason))
            return
        if reply.kind == BROKEN:
            raise RuntimeError(f"preparation cannot start: {reply.reason}")
        if reply.kind == READY:
            worker.ready(self.deadline_s)
            self.stats.start_s = self.stats.start_s or time.monotonic() - self._began
            return
        assert reply.kind == DONE
        worker.next(self.deadline_s)
        self.stats.busy_s += reply.seconds
        self._finish(Prepared(task.key, reply.value, reply.reason, reply.num_bytes))

    def _expire(self, worker: _Worker, tasks: _Queue, workers: list[_Worker]) -> None:
        task = worker.task
        self._remove(worker, tasks, workers)
        self.stats.killed += 1
        if not worker.is_ready:
            raise RuntimeError(f"a preparation process did not start within {START_SECONDS:g} s")
        self.stats.busy_s += self.deadline_s
        self._finish(Prepared(task.key, reason=f"preparation took longer than {self.deadline_s:g} s and was stopped"))

    def _remove(self, worker: _Worker, tasks: _Queue, workers: list[_Worker]) -> None:
        """Kill a process; what only waited in it goes back to the queue."""
        worker.kill()
        workers.remove(worker)
        for task, attempt in list(worker.tasks)[:0:-1]:
            tasks.retry(task, attempt)

    def _finish(self, outcome: Prepared) -> None:
        with self._lock:
            if outcome.num_bytes:
                self._held[outcome.key] = outcome.num_bytes
            self._largest = max(self._largest, outcome.num_bytes)
            self.stats.peak_bytes = max(self.stats.peak_bytes, sum(self._held.values()))
        self._outcomes.put(outcome)


def _packed(task: Task) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    return bytes(ForkingPickler.dumps(task.payload))


class _Queue:
    """Tasks in order, looking a little ahead so that a process can stay with its group."""

    def __init__(self, tasks: Iterator[Task], ahead: int = 64) -> None:
        self._tasks, self._ahead = tasks, ahead
        self._open: deque[tuple[Task, int]] = deque()

    def __len__(self) -> int:
        """Tasks in sight."""
        self._fill()
        return len(self._open)

    def empty(self) -> bool:
        return len(self) == 0

    def retry(self, task: Task, attempt: int) -> None:
        self._open.appendleft((task, attempt))

    def take(self, idle: list[_Worker]) -> tuple[Task, int, _Worker]:
        """The next task with the process that should do it: one that has its group, else the first idle one."""
        self._fill()
        for worker in idle:
            if worker.group:
                for place, (task, attempt) in enumerate(self._open):
                    if task.group == worker.group:
                        del self._open[place]
                        return task, attempt, worker
        task, attempt = self._open.popleft()
        return task, attempt, idle[0]

    def _fill(self) -> None:
        if len(self._open) < self._ahead:
            self._open.extend((task, 1) for task in itertools.islice(self._tasks, self._ahead - len(self._open)))


@dataclass(eq=False)
class _Worker:
    """One process and the connection to it."""

    build: Callable[[], Prepare]
    preload: Sequence[str]
    tasks: deque[tuple[Task, int]] = field(default_factory=deque)
    """The task in work and, behind it, one that waits, each with the number of its attempt."""
    group: str = ""
    deadline: float = field(default=0.0)
    is_ready: bool = False

    def __post_init__(self) -> None:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["eval.worker", *self.preload])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.build), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def task(self) -> Task | None:
        """The task in work."""
        return self.tasks[0][0] if self.tasks else None

    def give(self, task: Task, attempt: int, data: bytes, deadline_s: float) -> None:
        self.tasks.append((task, attempt))
        self.group = task.group
        if len(self.tasks) == 1:
            self.deadline = time.monotonic() + (deadline_s if self.is_ready else START_SECONDS)
        try:
            self.connection.send_bytes(data)
        except OSError:  # it died while idle: the pump meets the closed connection and repeats the task
            log.debug("preparation process %s is gone", self.process.pid)

    def next(self, deadline_s: float) -> None:
        """The task in work is done; the time of the one behind it starts."""
        self.tasks.popleft()
        self.deadline = time.monotonic() + deadline_s

    def ready(self, deadline_s: float) -> None:
        """The process is up: the item's own time starts now."""
        self.is_ready = True
        self.deadline = time.monotonic() + deadline_s

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


__all__ = ["PoolStats", "PreparePool", "Prepared", "Reply", "Task"]
