"""Preparation in processes that can be killed: one deadline per item, bounded by the bytes that are prepared.

The processes are those of `datamodules.common.workers`; frames come back as anonymous memory, without a copy.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from datamodules.common.wire import WireError
from datamodules.common.worker_handle import PoolClosed, Reply, WorkerBroken, WorkerDied, WorkerError, WorkerTimeout
from datamodules.common.workers import PoolStats, WorkerPool

ATTEMPTS = 2
"""An item whose process dies gets one more."""
AHEAD = 2
"""Items per process that are in preparation or wait for it, so that neighbours can go to one process."""


class _Mark(enum.Enum):
    END = "end"


_END: Final = _Mark.END


@dataclass(frozen=True)
class Task:
    """One item to be prepared."""

    key: str
    payload: Any
    """What the prepare function takes; see `datamodules.common.wire`."""
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


class PreparePool:
    """Prepares tasks in `processes` processes.

    Args:
        build: called once in every process; returns the function that prepares one payload. Must pickle.
        processes: how many.
        deadline_s: seconds for one item; afterwards its process is killed and the item has failed.
        max_bytes: no new item is started while prepared, unreleased items (and those about to be) would exceed it;
            one item is always let through, so that a single huge one cannot block the run.

    Raises:
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        build: Callable[[], Callable[[Any], Any]],
        processes: int = 4,
        deadline_s: float = 300.0,
        max_bytes: int = 8 << 30,
    ) -> None:
        if deadline_s <= 0 or max_bytes <= 0:
            raise ValueError(f"deadline_s={deadline_s} and max_bytes={max_bytes} must be positive")
        self.deadline_s, self.max_bytes = deadline_s, max_bytes
        self.peak_bytes = 0
        """Most bytes that were prepared and not released."""
        self._workers = WorkerPool(build, processes, attempts=ATTEMPTS)
        self._outcomes: queue.SimpleQueue[Prepared | Exception | _Mark | None] = queue.SimpleQueue()
        self._tasks: Iterator[Task] = iter(())
        self._next: Task | None = None
        self._waiting = 0
        """Items in preparation."""
        self._held: dict[str, int] = {}
        self._largest = 0
        self._lock = threading.RLock()

    @property
    def stats(self) -> PoolStats:
        """What the processes did."""
        return self._workers.stats

    def start(self, count: int | None = None) -> None:
        """Start processes now, so that they are up when the engine is; `run` starts what is missing.

        Args:
            count: how many; None = all.
        """
        self._workers.start(count)

    def run(self, tasks: Iterable[Task]) -> Iterator[Prepared | None]:
        """Yield one outcome per task, in the order in which they are ready.

        None says that memory is full: nothing more comes before something is released.

        Raises:
            RuntimeError: the processes cannot start.
        """
        self._tasks = iter(tasks)
        self._advance()
        self._fill()
        try:
            while (outcome := self._outcomes.get()) is not _END:
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            self.close()

    def release(self, key: str) -> None:
        """The memory of a prepared item is free again."""
        with self._lock:
            self._held.pop(key, None)
        self._fill()

    def close(self) -> None:
        """Stop: the processes are killed, outcomes that nobody took are dropped."""
        self._workers.close()

    def _fill(self) -> None:
        """Hand out tasks while there is room; say so when nothing can come any more, or not before a release."""
        with self._lock:
            while (task := self._next) is not None and self._has_room():
                self._advance()
                try:
                    pending = self._workers.submit(task.payload, self.deadline_s, task.group)
                except WireError as error:
                    self._outcomes.put(Prepared(task.key, reason=str(error)))
                    continue
                except PoolClosed:
                    return
                self._waiting += 1
                pending.add_done_callback(partial(self._finish, task.key))
            if not self._waiting:
                self._outcomes.put(_END if self._next is None else None)

    def _advance(self) -> None:
        try:
            self._next = next(self._tasks, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer must hear it instead of waiting forever
            self._next = None
            self._outcomes.put(error)

    def _has_room(self) -> bool:
        # Until the first item has shown a size, none waits for a process.
        if self._waiting >= self._workers.processes * (AHEAD if self._largest else 1):
            return False
        held = sum(self._held.values())
        return (not self._waiting and not held) or held + (self._waiting + 1) * self._largest <= self.max_bytes

    def _finish(self, key: str, done: Future[Reply]) -> None:
        try:
            reply = done.result()
            outcome: Prepared | Exception = Prepared(key, reply.value, num_bytes=reply.num_bytes)
            size = reply.num_bytes
        except PoolClosed:
            return
        except WorkerError as error:
            outcome, size = _failure(key, error), 0
        with self._lock:
            self._waiting -= 1
            if size:
                self._held[key] = size
            self._largest = max(self._largest, size)
            self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
            self._outcomes.put(outcome)
        self._fill()


def _failure(key: str, error: WorkerError) -> Prepared | Exception:
    if isinstance(error, WorkerBroken):
        return RuntimeError(f"preparation cannot start: {error}")
    if isinstance(error, WorkerDied):
        return Prepared(key, reason=f"the preparation process died {ATTEMPTS} times (exit code {error.code})")
    return Prepared(key, reason=f"preparation {error}" if isinstance(error, WorkerTimeout) else str(error))
