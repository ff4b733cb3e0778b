"""Judgements that may be slow or hostile, in processes that can be killed (`datamodules.common.workers`).

A judgement over its time limit costs its own verdict only. The processes see a harmless environment, their memory is
limited, and what they say is read as a `Verdict` or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import get_args

from datamodules.common.worker_handle import (
    PoolClosed,
    Reply,
    WorkerBroken,
    WorkerDied,
    WorkerOptions,
    WorkerRaised,
    WorkerTimeout,
)
from datamodules.common.workers import WorkerPool
from rewards.base import Query, Status, TaskReward, Verdict

log = logging.getLogger(__name__)
MAX_REPLY = 1 << 20


@dataclass(frozen=True)
class Answer:
    """What is to be judged."""

    task: str
    query: Query
    text: str


@dataclass(frozen=True)
class Judging:
    """Builds, in a process, the function that judges an answer; tasks must pickle."""

    tasks: Mapping[str, TaskReward]

    def __call__(self) -> Callable[[Answer], Verdict]:
        """Import what the tasks need, before the first deadline starts."""
        for task in self.tasks.values():
            task.warm_up()
        return self.judge

    def judge(self, answer: Answer) -> Verdict:
        """The task's verdict."""
        return plain(self.tasks[answer.task].judge(answer.query, answer.text))


def plain(verdict: Verdict) -> Verdict:
    """A verdict whose numbers are Python's and whose text is short.

    Raises:
        TypeError, ValueError, AttributeError: it is no verdict.
    """
    if verdict.status not in get_args(Status):
        raise ValueError(f"status {verdict.status!r} is unknown")
    return replace(
        verdict,
        accuracy=float(verdict.accuracy),
        reward=None if verdict.reward is None else float(verdict.reward),
        reason=str(verdict.reason)[:1000],
        parts={str(name): float(value) for name, value in verdict.parts.items()},
    )


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
        options = WorkerOptions(
            start_s=start_seconds,
            memory_bytes=memory_mb << 20,
            private=True,
            max_reply_bytes=MAX_REPLY,
            only=(Verdict,),
        )
        self._pool = WorkerPool(Judging(dict(tasks)), workers, options)
        self._pool.start()

    def submit(self, name: str, query: Query, answer: str, limit: float) -> Future[Verdict]:
        """Judge `answer` with task `name` within `limit` seconds; the future never raises.

        Raises:
            PoolClosed: the pool is closed.
        """
        result: Future[Verdict] = Future()
        try:
            pending = self._pool.submit(Answer(name, query, answer), limit, other=str)
        except PoolClosed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a record holds: its answer waits for a verdict
            reason = f"the record cannot be sent to a process: {type(error).__name__}: {error}"[:500]
            result.set_result(Verdict(0.0, "error", reason))
            return result
        pending.add_done_callback(lambda done: result.set_result(_verdict(done)))
        return result

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._pool.pids

    def close(self) -> None:
        """Kill the workers; unfinished judgements end with status "error"."""
        self._pool.close()


def _verdict(done: Future[Reply]) -> Verdict:
    try:
        return plain(done.result().value)
    except WorkerTimeout as error:
        return Verdict(0.0, "timeout", f"judging {error}")
    except WorkerRaised as error:
        if error.kind == "MemoryError":
            return Verdict(0.0, "error", "judging needed more memory than a scoring process may use")
        return Verdict(0.0, "error", f"{error.kind}: {error}"[:500])
    except WorkerDied as error:
        return Verdict(0.0, "error", f"the scoring process died ({error})")
    except WorkerBroken as error:
        log.error("scoring: %s", error)
        return Verdict(0.0, "error", f"the scoring process could not be started: {error}"[:500])
    except PoolClosed:
        return Verdict(0.0, "error", "the scoring pool was closed")
    except (TypeError, ValueError, AttributeError) as error:
        return Verdict(0.0, "error", f"unreadable reply of the scoring process: {error!r}"[:500])
