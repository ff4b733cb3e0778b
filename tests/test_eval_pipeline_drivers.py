"""Both drivers give every request exactly one outcome, whatever the engine does."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from eval_latency import LatencyEngine, response

from datamodules.types import PreparedSample, Sample
from eval.engine.async_driver import AsyncDriver
from eval.engine.generate import LockStepDriver
from rollout.types import GenerateRequest, SampleError, SamplingSpec

GREEDY = SamplingSpec(n=1, temperature=0.0, max_tokens=4)


def requests(*texts: str) -> list[GenerateRequest]:
    samples = [Sample(f"u{i}", text, "", "open-ended", "text") for i, text in enumerate(texts)]
    return [GenerateRequest(s.uid, PreparedSample(s, s.problem, (1,), (1,)), GREEDY, 0) for s in samples]


def outcomes(driver, items) -> dict[str, str]:
    try:
        found = [(o.request.request_id, o.response.text if o.response else o.reason) for o in driver.run(items)]
    finally:
        driver.close()
    assert max(Counter(uid for uid, _ in found).values()) == 1
    return dict(found)


def test_async_requests_that_raise_or_never_return_are_outcomes_and_the_rest_is_answered():
    driver = AsyncDriver([LatencyEngine], max_in_flight=3, deadline_s=3.0)
    found = outcomes(driver, requests("one", "engine raises", "engine hangs", "two"))
    assert found == {
        "u0": "answer to one",
        "u1": "no room for this prompt",
        "u2": "no answer within 3 s",
        "u3": "answer to two",
    }


def test_a_dead_engine_is_started_again_and_only_the_guilty_item_fails():
    built = []

    def build():
        built.append(LatencyEngine(0.01))
        return built[-1]

    driver = AsyncDriver([build], max_in_flight=4, restarts=5)
    found = outcomes(driver, requests("one", "engine dies", *["fine"] * 8))
    assert found.pop("u1") == "the engine died 2 times with this item: gone"
    assert set(found.values()) == {"answer to one", "answer to fine"}
    assert len(found) == 9
    assert len(built) == 3


def test_items_of_a_replica_lost_for_good_go_to_the_other_one():
    engines = {"bad": LatencyEngine(), "good": LatencyEngine()}

    async def die(request):
        from eval.engine.errors import EngineLostError

        raise EngineLostError("node down")

    engines["bad"].generate = die
    driver = AsyncDriver([lambda: engines["bad"], lambda: engines["good"]], max_in_flight=2, restarts=0)
    found = outcomes(driver, requests(*["fine"] * 9))
    assert list(found.values()) == ["answer to fine"] * 9


def test_without_any_engine_left_outcomes_are_not_final():
    async def die(request):
        from eval.engine.errors import EngineLostError

        raise EngineLostError("node down")

    engine = LatencyEngine()
    engine.generate = die
    driver = AsyncDriver([lambda: engine], max_in_flight=2, restarts=0)
    found = list(driver.run(requests(*["fine"] * 6)))
    driver.close()
    assert len(found) == 6
    assert all(outcome.response is None for outcome in found)
    assert sum(not outcome.is_final for outcome in found) >= 4


def test_an_engine_that_is_restarted_while_its_run_ends_is_whole_in_the_next_run():
    import asyncio

    asked_again = threading.Event()
    built = []

    class SlowStart(LatencyEngine):
        is_up = False

        async def start(self) -> None:
            built.append(self)
            if len(built) > 1:
                await asyncio.to_thread(asked_again.wait)
            self.is_up = True

        async def generate(self, request):
            if not self.is_up:
                raise RuntimeError("half an engine")
            return await super().generate(request)

    def questions():
        asked_again.set()
        yield from requests(*["fine"] * 4)

    driver = AsyncDriver([SlowStart], max_in_flight=4, deadline_s=3.0)
    # Eight deadlines in a row make the driver start the engine again, with the last of them the run is over.
    first = [outcome.reason for outcome in driver.run(requests(*["engine hangs"] * 8))]
    assert first == ["no answer within 3 s"] * 8
    assert set(outcomes(driver, questions()).values()) == {"answer to fine"}
    assert driver.stats.restarts == 1


def test_in_flight_limit_and_idle_share():
    class Counting(LatencyEngine):
        now = most = 0

        async def generate(self, request):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().generate(request)
            finally:
                self.now -= 1

    engine = Counting(0.05)
    driver = AsyncDriver([lambda: engine], max_in_flight=2)
    assert len(outcomes(driver, requests(*["x"] * 8))) == 8
    assert engine.most == 2
    assert driver.stats.requests == 8
    assert 0 <= driver.stats.idle_share <= 1


def test_an_error_in_the_stream_of_requests_reaches_the_caller():
    def stream():
        yield from requests("one")
        raise ValueError("the pool is broken")

    driver = AsyncDriver([LatencyEngine])
    with pytest.raises(ValueError, match="the pool is broken"):
        outcomes(driver, stream())


def lock_step(texts, batch_size=3):
    sizes = []

    def generate(batch):
        sizes.append(len(batch))
        for request in batch:
            text = request.prompt.prompt_text
            if "sample error" in text:
                raise SampleError(request.prompt.uid, "too long")
            if "engine raises" in text:
                raise RuntimeError("bad kernel")
            yield request.request_id, response(text)

    driver = LockStepDriver(generate, batch_size)
    return outcomes(driver, [r if t else None for r, t in zip(requests(*texts), texts, strict=True)]), sizes


def test_lock_step_repeats_a_batch_without_the_sample_that_fails():
    found, sizes = lock_step(["one", "sample error", "two", "engine raises", "three"])
    assert found == {
        "u0": "answer to one",
        "u1": "too long",
        "u2": "answer to two",
        "u3": "bad kernel",
        "u4": "answer to three",
    }
    # [one, error, two] -> [two] -> [raises, three] -> one by one.
    assert sizes == [3, 1, 2, 1, 1]


def test_lock_step_sends_what_it_has_when_memory_is_full():
    found, sizes = lock_step(["one", "two", "", "three"])
    assert len(found) == 3
    assert sizes == [2, 1]


def test_lock_step_gives_up_on_an_engine_that_fails_with_everything():
    found, sizes = lock_step(["engine raises"] * 9, batch_size=4)
    assert set(found.values()) == {"the engine was lost: bad kernel", "the engine was lost"}
    assert len(found) == 9
    assert len(sizes) == 4


def test_engines_that_would_share_a_gpu_are_refused(monkeypatch):
    import torch

    from eval.engine.drivers import make_async

    make_async(LatencyEngine, replicas=2).close()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    make_async(LatencyEngine).close()
    with pytest.raises(ValueError, match=r"driver.replicas=2: all would use the same GPU; driver=ray"):
        make_async(LatencyEngine, replicas=2)
