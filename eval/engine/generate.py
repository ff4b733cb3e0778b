"""Drivers: prepared requests in, one outcome per request out, whatever the engine does.

`LockStepDriver` wraps any `GenerateFn` and sends batch after batch: for the colocated engine of a training run, whose
tensor-parallel ranks need identical requests. `AsyncDriver` keeps replicas (vLLM's AsyncLLM, Ray actors) filled from
one queue: a request enters as soon as it is prepared and another one has left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from eval.engine.deadline import WatchedGenerate
from eval.engine.errors import DeadlineError, EngineLostError
from rollout.types import GenerateFn, GenerateRequest, Response, SampleError

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3
"""So many single requests that fail one after the other mean that the engine is broken, not the prompts."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    request: GenerateRequest
    response: Response | None = None
    reason: str = ""
    """Why there is no response."""
    is_final: bool = True
    """False: the engine was lost before the request had its chance; a later run asks again."""
    seconds: float = 0.0
    """From submission to the outcome."""


@dataclass
class DriverStats:
    """How the engine was used; sums over all replicas."""

    requests: int = 0
    active_s: float = 0.0
    """Seconds with at least one request in flight, per replica."""
    span_s: float = 0.0
    """Seconds from the first request to the last outcome, per replica."""
    restarts: int = 0

    @property
    def idle_share(self) -> float:
        """Share of the span in which a replica had nothing to do."""
        return 1 - self.active_s / self.span_s if self.span_s > 0 else 0.0


class Driver(Protocol):
    """Answers requests. The pipeline knows nothing else about generation."""

    stats: DriverStats

    def run(self, requests: Iterable[GenerateRequest | None]) -> Iterator[Outcome]:
        """Yield one outcome per request, in any order.

        None among the requests says that nothing more comes before an outcome was taken (memory is full).
        """
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


class LockStepDriver:
    """Batch after batch through a `GenerateFn`.

    A batch that raises is repeated without the sample that the engine named, or request by request when it named
    none. What a batch has not answered at its deadline has failed; when the engine does not come back either, the
    remaining requests are not final.

    Args:
        generate: the engine.
        batch_size: requests per call.
        close: called by `close`, for instance the engine's own.
        deadline_s: seconds for one call, made in a thread of its own; None = no limit.
    """

    def __init__(
        self,
        generate: GenerateFn,
        batch_size: int = 32,
        close: Callable[[], None] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._watched = None if deadline_s is None else WatchedGenerate(generate, deadline_s)
        self._generate, self._batch_size, self._close = self._watched or generate, batch_size, close
        self.stats = DriverStats()

    def run(self, requests: Iterable[GenerateRequest | None]) -> Iterator[Outcome]:
        """See `Driver`."""
        started = time.monotonic()
        failures = 0
        for batch in _batches(requests, self._batch_size):
            for outcome in self._answer(batch, failures):
                failures = 0 if outcome.response is not None else failures + (not outcome.is_final)
                yield outcome
        self.stats.span_s += time.monotonic() - started

    def close(self) -> None:
        """Release the engine, unless it hangs: waiting for it would be endless."""
        if self._watched is not None:
            self._watched.close()
            if self._watched.is_stuck:
                log.warning("evaluation: the engine hangs; it ends with this process")
                return
        if self._close is not None:
            self._close()

    def _answer(self, batch: list[GenerateRequest], lost: int) -> Iterator[Outcome]:
        if lost:
            yield from fail_all(batch, "the engine was lost")
            return
        started = time.monotonic()
        self.stats.requests += len(batch)
        try:
            yield from self._whole(batch)
        finally:
            self.stats.active_s += time.monotonic() - started

    def _whole(self, batch: list[GenerateRequest]) -> Iterator[Outcome]:
        """The batch in one call; repeated without a sample that fails."""
        started = time.monotonic()
        left = {request.request_id: request for request in batch}
        while left:
            try:
                for request_id, response in self._generate(list(left.values())):
                    yield Outcome(left.pop(request_id), response, seconds=time.monotonic() - started)
                for request in left.values():
                    yield Outcome(request, reason="the engine returned nothing", seconds=time.monotonic() - started)
                return
            except SampleError as error:
                log.warning("evaluation: %s", error)
                bad = [request for request in left.values() if request.prompt.uid == error.uid]
                if not bad:
                    yield from self._single(list(left.values()))
                    return
                for request in bad:
                    del left[request.request_id]
                    yield Outcome(request, reason=error.reason, seconds=time.monotonic() - started)
            except DeadlineError as error:
                log.warning("evaluation: %d of a batch of %d have %s", len(left), len(batch), error)
                for request in left.values():
                    yield Outcome(request, reason=str(error), seconds=time.monotonic() - started)
                return
            except EngineLostError as error:
                log.error("evaluation: %s; giving up on it", error)
                yield from fail_all(list(left.values()), f"the engine was lost: {error}")
                return
            except Exception as error:  # noqa: BLE001 - an engine may raise anything; its batch must get its outcomes
                log.warning("evaluation: a batch of %d failed (%s); repeating one by one", len(left), error)
                yield from self._single(list(left.values()))
                return

    def _single(self, batch: list[GenerateRequest]) -> Iterator[Outcome]:
        failed: list[Outcome] = []
        for place, request in enumerate(batch):
            started = time.monotonic()
            try:
                ((_, response),) = list(self._generate([request]))
            except EngineLostError as error:
                lost = [*(outcome.request for outcome in failed), *batch[place:]]
                yield from fail_all(lost, f"the engine was lost: {error}")
                return
            except Exception as error:  # noqa: BLE001 - as above
                reason = error.reason if isinstance(error, SampleError) else str(error) or type(error).__name__
                failed.append(Outcome(request, reason=reason, seconds=time.monotonic() - started))
                if len(failed) < MAX_FAILURES_IN_A_ROW:
                    continue
                log.error("evaluation: the engine fails with every request (%s); giving up on it", reason)
                gone = [*(outcome.request for outcome in failed), *batch[place + 1 :]]
                yield from fail_all(gone, f"the engine was lost: {reason}")
                return
            yield from failed
            failed.clear()
            yield Outcome(request, response, seconds=time.monotonic() - started)
        yield from failed


def _batches(requests: Iterable[GenerateRequest | None], size: int) -> Iterator[list[GenerateRequest]]:
    batch: list[GenerateRequest] = []
    for request in requests:
        if request is not None:
            batch.append(request)
        if batch and (request is None or len(batch) == size):
            yield batch
            batch = []
    if batch:
        yield batch


def fail_all(requests: Sequence[GenerateRequest], reason: str) -> Iterator[Outcome]:
    """Outcomes of requests that no engine could take."""
    return (Outcome(request, reason=reason, is_final=False) for request in requests)
