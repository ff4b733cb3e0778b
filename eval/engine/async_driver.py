"""Keeps one or several engine replicas filled from one queue, and survives their deaths."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from eval.engine.errors import EngineLostError
from eval.engine.generate import DriverStats, Outcome
from rollout.types import GenerateRequest, Response

log = logging.getLogger(__name__)

MAX_DEATHS = 2
"""An item with which a replica died is tried once more, alone among its like; the second death is its own."""


class Replica(Protocol):
    """One engine that answers many requests at a time."""

    async def start(self) -> None:
        """Load the model; called again after a death."""
        ...

    async def generate(self, request: GenerateRequest) -> Response:
        """Answer one request; cancelling it frees its place.

        Raises:
            EngineLostError: the engine is gone, with everything in flight.
        """
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


@dataclass(eq=False)
class _Ticket:
    request: GenerateRequest
    deaths: int = 0
    started: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Slot:
    """One replica and what is known about it."""

    name: str
    build: Callable[[], Replica]
    replica: Replica | None = None
    generation: int = 0
    """Counts the starts; a ticket that fails with an old one does not restart the new one."""
    restarts_left: int = 0
    is_dead: bool = False
    in_flight: int = 0
    since: float = 0.0
    active_s: float = 0.0
    silent: int = 0
    """Deadlines in a row without an answer."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AsyncDriver:
    """A `Driver` over replicas that share one queue.

    Every request has a deadline. A request that fails is an outcome; a replica that is lost is started again (at
    most `restarts` times) and its requests go back to the queue; when no replica is left, what remains is returned as
    not final, so that a later run asks again.

    Args:
        replicas: builds one replica each; started with the first run.
        max_in_flight: requests in flight per replica.
        deadline_s: seconds for one request in the engine.
        restarts: how often each replica may be started again.
    """

    def __init__(
        self,
        replicas: Sequence[Callable[[], Replica]],
        max_in_flight: int = 64,
        deadline_s: float = 1800.0,
        restarts: int = 2,
    ) -> None:
        if not replicas:
            raise ValueError("an evaluation needs at least one engine replica")
        if max_in_flight < 1 or deadline_s <= 0:
            raise ValueError(f"max_in_flight={max_in_flight} and deadline_s={deadline_s} must be positive")
        self.stats = DriverStats()
        self._max_in_flight, self._deadline_s = max_in_flight, deadline_s
        self._slots = [_Slot(f"replica {i}", build, restarts_left=restarts) for i, build in enumerate(replicas)]
        self._loop = asyncio.new_event_loop()
        # The engine's process dies with the thread that started it, so the thread lives as long as the driver.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()
        self._pending: asyncio.Queue[_Ticket] = asyncio.Queue()
        self._suspects = asyncio.Semaphore(1)
        self._restarts: set[asyncio.Task] = set()

    def start(self) -> None:
        """Start all replicas now instead of with the first request.

        Raises:
            Exception: what a replica raises; there is nothing to evaluate with then.
        """
        asyncio.run_coroutine_threadsafe(self._start_all(), self._loop).result()

    def run(self, requests: Iterable[GenerateRequest | None]) -> Iterator[Outcome]:
        """See `Driver`."""
        run = _Run(threading.Semaphore(self._max_in_flight * len(self._slots)))
        # Items are prepared while the engines load.
        threading.Thread(target=self._feed, args=(requests, run), name="feeder", daemon=True).start()
        pumps: list[Future] = []
        began = None
        taken = 0
        try:
            self.start()
            began = time.monotonic()
            for slot in self._slots:
                slot.active_s = 0.0
                pumps += [
                    asyncio.run_coroutine_threadsafe(self._pump(slot, run), self._loop)
                    for _ in range(self._max_in_flight)
                ]
            while not (run.fed and taken == run.given):
                outcome = run.outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                if outcome is not None:
                    taken += 1
                    run.slots.release()
                    yield outcome
        finally:
            self.stats.requests += taken
            run.stop = True
            run.slots.release()
            for pump in pumps:
                pump.cancel()
            if began is not None:
                self.stats.span_s += (time.monotonic() - began) * len(self._slots)
                self.stats.active_s += sum(slot.active_s for slot in self._slots)

    def close(self) -> None:
        """Release the engines."""
        for slot in self._slots:
            if slot.replica is not None:
                self._loop.call_soon_threadsafe(slot.replica.close)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    def _feed(self, requests: Iterable[GenerateRequest | None], run: _Run) -> None:
        try:
            for request in requests:
                if request is None:
                    continue
                run.slots.acquire()
                if run.stop:
                    return
                run.given += 1
                self._loop.call_soon_threadsafe(self._pending.put_nowait, _Ticket(request))
        except Exception as error:  # noqa: BLE001 - the consumer must hear of it instead of waiting forever
            run.outcomes.put(error)
        finally:
            run.fed = True
            run.outcomes.put(None)

    async def _start_all(self) -> None:
        for slot in self._slots:
            async with slot.lock:  # an earlier run may have left it while it was being started again
                if slot.replica is None and not slot.is_dead:
                    slot.replica = slot.build()
                    await slot.replica.start()

    async def _pump(self, slot: _Slot, run: _Run) -> None:
        """One place of one replica: take a ticket, see it through, take the next."""
        while not run.stop:
            ticket = await self._pending.get()
            if slot.is_dead:
                if all(other.is_dead for other in self._slots):
                    run.outcomes.put(Outcome(ticket.request, reason="the engine was lost", is_final=False))
                    continue
                self._pending.put_nowait(ticket)
                return
            try:
                if ticket.deaths:
                    async with self._suspects:
                        await self._answer(slot, ticket, run)
                else:
                    await self._answer(slot, ticket, run)
            except Exception as error:  # a mistake of ours must end the run loudly, not hang it
                run.outcomes.put(error)
                raise

    async def _answer(self, slot: _Slot, ticket: _Ticket, run: _Run) -> None:
        async with slot.lock:  # not while it is being started again
            generation, replica = slot.generation, slot.replica
        if replica is None:
            self._pending.put_nowait(ticket)
            return
        ticket.started = time.monotonic()
        if slot.in_flight == 0:
            slot.since = ticket.started
        slot.in_flight += 1
        task = asyncio.ensure_future(replica.generate(ticket.request))
        try:
            # Not wait_for: that would wait forever for a task that ignores its cancellation.
            await asyncio.wait({task}, timeout=self._deadline_s)
        finally:
            slot.in_flight -= 1
            if slot.in_flight == 0:
                slot.active_s += time.monotonic() - slot.since
            if not task.done():
                task.cancel()
        seconds = time.monotonic() - ticket.started
        if not task.done() or task.cancelled():
            slot.silent += 1
            run.outcomes.put(
                Outcome(ticket.request, reason=f"no answer within {self._deadline_s:g} s", seconds=seconds)
            )
            if slot.silent >= max(8, 2 * self._max_in_flight):
                await self._restart(slot, generation, f"{slot.silent} requests in a row got no answer")
            return
        error = task.exception()
        if isinstance(error, EngineLostError):
            await self._restart(slot, generation, str(error))
            ticket.deaths += 1
            if ticket.deaths < MAX_DEATHS:
                self._pending.put_nowait(ticket)
                return
            reason = f"the engine died {MAX_DEATHS} times with this item: {error}"
            run.outcomes.put(Outcome(ticket.request, reason=reason))
        elif error is not None:
            reason = getattr(error, "reason", "") or str(error) or type(error).__name__
            run.outcomes.put(Outcome(ticket.request, reason=reason, seconds=seconds))
        else:
            slot.silent = 0
            run.outcomes.put(Outcome(ticket.request, task.result(), seconds=seconds))

    async def _restart(self, slot: _Slot, generation: int, reason: str) -> None:
        # A task of its own: a run that ends cancels its pumps, and must not leave a half-started engine to the next.
        task = asyncio.ensure_future(self._start_again(slot, generation, reason))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        await asyncio.shield(task)

    async def _start_again(self, slot: _Slot, generation: int, reason: str) -> None:
        async with slot.lock:
            if slot.generation != generation or slot.is_dead:
                return
            slot.generation += 1
            slot.silent = 0
            _close_quietly(slot)
            while slot.restarts_left > 0:
                slot.restarts_left -= 1
                self.stats.restarts += 1
                log.warning("evaluation: %s was lost (%s); starting it again", slot.name, reason)
                try:
                    slot.replica = slot.build()
                    await slot.replica.start()
                    return
                except Exception as error:  # noqa: BLE001 - whatever keeps an engine from starting costs one try
                    reason = str(error)
                    _close_quietly(slot)
            log.error("evaluation: %s is lost for good (%s)", slot.name, reason)
            slot.is_dead = True


class _Run:
    """State of one `run`: what was handed in and what came out."""

    def __init__(self, slots: threading.Semaphore) -> None:
        self.slots = slots
        self.outcomes: queue.Queue[Outcome | BaseException | None] = queue.Queue()
        """None only wakes the consumer."""
        self.given = 0
        """Requests handed in; written by the feeder only."""
        self.fed = self.stop = False


def _close_quietly(slot: _Slot) -> None:
    if slot.replica is None:
        return
    try:
        slot.replica.close()
    except Exception as error:  # noqa: BLE001 - it is dead already; what its remains say changes nothing
        log.debug("closing %s: %s", slot.name, error)
    slot.replica = None
