"""A pool of killable processes, for work that may hang, leak, crash or be hostile: decoding, scoring, preparing.

A worker is a fresh interpreter that serves one request at a time over a socket. A request over its deadline costs
itself only: the worker is killed with everything it started and replaced. Values travel as `datamodules.common.wire`
writes them, arrays in an anonymous memory file without a copy. Workers need no multiprocessing, so daemonic loader
processes may have them; no signals, so any thread may; and they die with the process that started them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from datamodules.common.wire import Packed, pack
from datamodules.common.worker_handle import (
    PoolClosed,
    Reply,
    Worker,
    WorkerBroken,
    WorkerDied,
    WorkerError,
    WorkerOptions,
    WorkerTimeout,
    starter,
    sweep,
)

MAX_REQUESTS = 500
"""A worker is replaced after so many requests, which bounds what leaking libraries can hold."""


@dataclass
class PoolStats:
    """What a pool did; seconds are sums over its workers."""

    start_s: float = 0.0
    """Seconds from the pool's first request to start until the first worker was ready."""
    busy_s: float = 0.0
    killed: int = 0
    """Workers stopped at a deadline."""
    died: int = 0
    """Workers that ended by themselves."""


@dataclass(eq=False)
class _Job:
    payload: Packed
    deadline_s: float
    group: str
    future: Future[Reply]
    attempts: int = 0


class WorkerPool:
    """Does requests in up to `processes` workers, which start when there is work for them.

    Args:
        build: called once in every worker, returns the function that turns a payload into a value; must pickle.
        processes: how many.
        options: of the workers.
        attempts: how often a request is tried whose worker dies.

    Raises:
        ValueError: no process is allowed.
    """

    def __init__(
        self,
        build: Callable[[], Callable[[Any], Any]],
        processes: int,
        options: WorkerOptions | None = None,
        attempts: int = 1,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes={processes}: at least one is needed")
        self.processes, self.options, self.attempts = processes, options or WorkerOptions(), attempts
        self.stats = PoolStats()
        self._build = pickle.dumps(build)
        self._broken: WorkerBroken | None = None
        self._reset()
        if self.options.private:
            sweep()
            atexit.register(self.close)  # removes the workers' folders

    def _reset(self) -> None:
        """The state of a pool without workers; in a forked process too, because the workers belong to the parent."""
        self._pid, self._wake, self._closed = os.getpid(), threading.Condition(), False
        self._jobs: deque[_Job] = deque()
        self._open, self._began = 0, 0.0
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()

    def submit(
        self, payload: Any, deadline_s: float, group: str = "", other: Callable[[Any], Any] | None = None
    ) -> Future[Reply]:
        """Do one request; the future yields a `Reply` or raises a `WorkerError`.

        Args:
            payload: what the function takes; see `wire.pack` for what it may be, and for `other`.
            deadline_s: seconds for it, from the moment at which a worker takes it.
            group: requests of one group go to one worker where that costs nothing.

        Raises:
            PoolClosed: the pool is closed.
            WireError: the payload cannot be sent.
        """
        job = _Job(pack(payload, other), deadline_s, group, Future())
        if self._pid != os.getpid():
            self._reset()
        with self._wake:
            if self._closed:
                raise PoolClosed("the pool is closed")
            self._jobs.append(job)
            self._open += 1
            if self._open > len(self._threads):
                self._add(1)
            self._wake.notify()
        return job.future

    def start(self, count: int | None = None) -> None:
        """Start workers now; `count` of them, None = all."""
        with self._wake:
            self._add((self.processes if count is None else count) - len(self._threads))

    def _add(self, count: int) -> None:
        self._began = self._began or time.monotonic()
        for _ in range(min(count, self.processes - len(self._threads))):
            self._threads.append(threading.Thread(target=self._serve, name="worker-pool", daemon=True))
            self._threads[-1].start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._wake:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the workers; unfinished requests end with PoolClosed."""
        if self._pid != os.getpid():
            return
        with self._wake:
            self._closed = True
            jobs, workers = list(self._jobs), list(self._workers)
            self._jobs.clear()
            self._wake.notify_all()
        for job in jobs:
            self._finish(job, PoolClosed("the pool was closed"))
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        """Life of one thread: it owns one worker at a time."""
        worker, group = self._started(), ""
        while (job := self._take(group)) is not None:
            if isinstance(worker, Worker) and not worker.alive():
                self._stop(worker)
                worker = self._started()
            group, outcome = job.group, worker if isinstance(worker, WorkerError) else self._ask(worker, job)
            stays = isinstance(worker, Worker) and worker.alive() and worker.served < MAX_REQUESTS
            if isinstance(worker, Worker) and not stays:
                self._stop(worker)
            self._finish(job, outcome)
            if not stays:
                worker = self._started()
        if isinstance(worker, Worker):
            self._stop(worker)

    def _take(self, group: str) -> _Job | None:
        """The next request, of `group` if there is one; None when the pool is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            place = next((i for i, job in enumerate(self._jobs) if group and job.group == group), 0)
            job = self._jobs[place]
            del self._jobs[place]
            return job

    def _ask(self, worker: Worker, job: _Job) -> Reply | WorkerError:
        job.attempts += 1
        try:
            reply = worker.ask(job.payload, job.deadline_s)
        except WorkerTimeout as error:
            worker.kill()
            self._count(killed=1, busy_s=job.deadline_s)
            return error
        except WorkerDied as error:
            self._count(died=1)
            return error
        except WorkerError as error:
            return error
        self._count(busy_s=reply.seconds)
        return reply

    def _count(self, **amounts: float) -> None:
        with self._wake:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)

    def _finish(self, job: _Job, outcome: Reply | WorkerError) -> None:
        with self._wake:
            if isinstance(outcome, WorkerDied) and job.attempts < self.attempts and not self._closed:
                self._jobs.appendleft(job)
                self._wake.notify()
                return
            self._open -= 1
            if self._closed and isinstance(outcome, WorkerError):
                outcome = PoolClosed("the pool was closed")
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Reply):
            job.future.set_result(outcome)
        else:
            job.future.set_exception(outcome)

    def _started(self) -> Worker | WorkerError:
        """A worker that has said that it is ready, or why there is none."""
        error: WorkerError = self._broken or PoolClosed("the pool was closed")
        for _ in range(2):  # one may be unlucky, for example while memory is short
            if self._broken or self._closed:
                return error
            try:
                worker = starter(os.getpid()).make(lambda: Worker(self._build, self.options))
            except OSError as problem:
                error = WorkerBroken(f"a worker cannot be started: {problem}")
                continue
            with self._wake:
                self._workers.add(worker)
            try:
                if not self._closed:  # `close` sets it before it looks for workers: one of the two sees this one
                    worker.wait_ready()
                    with self._wake:
                        self.stats.start_s = self.stats.start_s or time.monotonic() - self._began
                    return worker
            except WorkerBroken as problem:
                error = self._broken = problem
            except WorkerTimeout:
                error = WorkerBroken(f"a worker was not ready after {self.options.start_s:g} s")
            except WorkerDied as problem:
                error = WorkerBroken(f"a worker ended while it started ({problem})")
            self._stop(worker)
        return error

    def _stop(self, worker: Worker) -> None:
        worker.kill()
        worker.socket.close()
        with self._wake:
            self._workers.discard(worker)
