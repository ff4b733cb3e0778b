"""A deadline for engines that run in this process and cannot be interrupted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.engine.errors import DeadlineError, EngineLostError
from rollout.types import GenerateFn, GenerateRequest, Response

_RESPONSE, _ERROR, _END = "response", "error", "end"


@dataclass(eq=False)
class _Call:
    requests: Sequence[GenerateRequest]
    results: queue.Queue[tuple[str, Any]] = field(default_factory=queue.Queue)
    stop: bool = False
    """Nobody waits for more: the engine is released as soon as it hands out the next response."""


class WatchedGenerate:
    """A `GenerateFn` in a thread of its own, each call of which ends at a deadline.

    A call that is over its deadline raises `DeadlineError`; the engine leaves it at its next response. The next call
    waits for that, once more for the deadline, and raises `EngineLostError` when the engine does not come back.

    Args:
        generate: the engine.
        deadline_s: seconds for one call.
    """

    def __init__(self, generate: GenerateFn, deadline_s: float) -> None:
        if deadline_s <= 0:
            raise ValueError(f"deadline_s={deadline_s} must be positive")
        self._generate, self._deadline_s = generate, deadline_s
        self._calls: queue.Queue[_Call | None] = queue.Queue()
        self._idle = threading.Event()
        self._idle.set()
        # A daemon: an engine that never comes back must not keep the process.
        threading.Thread(target=self._main, name="engine", daemon=True).start()

    def __call__(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Yield (request_id, response) as the engine does."""
        if not self._idle.wait(self._deadline_s):
            raise EngineLostError(f"the engine has not come back {self._deadline_s:g} s after the deadline of a batch")
        self._idle.clear()
        call = _Call(requests)
        self._calls.put(call)
        end = time.monotonic() + self._deadline_s
        try:
            while True:
                try:
                    kind, value = call.results.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    raise DeadlineError(f"no answer within {self._deadline_s:g} s") from None
                if kind == _END:
                    return
                if kind == _ERROR:
                    raise value
                yield value
        finally:
            call.stop = True

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has not come back from its last call."""
        return not self._idle.is_set()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            end: tuple[str, Any] = (_END, None)
            try:
                stream = iter(self._generate(call.requests))
                for value in stream:
                    if call.stop:
                        break
                    call.results.put((_RESPONSE, value))
                if hasattr(stream, "close"):
                    stream.close()  # the engine drops what it has in flight
            except Exception as error:  # noqa: BLE001 - whatever the engine raises belongs to who called it
                end = (_ERROR, error)
            self._idle.set()
            call.results.put(end)
