"""The pipeline as a whole on an engine and a decoder that fail at random: every item ends in exactly one state."""

from __future__ import annotations

import random

import pytest
from eval_latency import FakeDecoder, LatencyEngine

from datamodules.types import Sample
from eval.benchmarks.types import BenchmarkItem
from eval.engine.async_driver import AsyncDriver
from eval.run.pipeline import ask, item_digest, open_items
from eval.run.pool import PreparePool
from eval.run.prepare import ReadyItem
from eval.run.records import RecordLog, read_records
from rollout.types import SamplingSpec

GREEDY = SamplingSpec(n=1, temperature=0.0, max_tokens=4)
TROUBLE = {
    "decoder raises": "damaged",
    "engine raises": "no room for this prompt",
    "engine hangs": "no answer within 3 s",
    "engine dies": "the engine died 2 times",
    "decoder dies": "process died 2 times",
    "decoder hangs": "preparation took longer than 5 s",
}


class ItemDecoder(FakeDecoder):
    def prepare(self, item: BenchmarkItem) -> ReadyItem:
        return ReadyItem(super().prepare(item.sample), 0)


def items(texts: list[str]) -> list[BenchmarkItem]:
    return [BenchmarkItem(f"b:{i}", Sample(f"b:{i}", text, "", "open-ended", "text")) for i, text in enumerate(texts)]


def run(questions, log: RecordLog, **options):
    engines = []

    def build():
        engines.append(LatencyEngine(0.002))
        return engines[-1]

    driver = AsyncDriver([build], max_in_flight=8, deadline_s=3.0, restarts=100)
    pool = PreparePool(ItemDecoder(), processes=3, deadline_s=5.0, max_bytes=20_000)
    try:
        stats = ask(questions, pool, driver, GREEDY, log, **options)
    finally:
        driver.close()
    return stats, {uid for engine in engines for uid in engine.seen}


@pytest.mark.parametrize("seed", [0, 1])
def test_every_item_ends_in_exactly_one_state(tmp_path, seed):
    rng = random.Random(seed)
    weights = [100, 4, 4, 2, 2, 1, 1]
    texts = rng.choices(["fine", *TROUBLE], weights, k=150)
    log = RecordLog(tmp_path / "answers.jsonl")
    told = []
    stats, _ = run(items(texts), log, on_answers=told.extend)
    log.close()
    records = read_records(tmp_path / "answers.jsonl")
    assert list(records) == [item.uid for item, _ in told]
    assert (tmp_path / "answers.jsonl").read_bytes().count(b"\n") == 150
    for item, text in zip(items(texts), texts, strict=True):
        record = records[item.uid]
        if text == "fine":
            assert (record["state"], record["response"]) == ("answered", "answer to fine")
        else:
            assert record["state"] == "failed"
            assert TROUBLE[text] in record["reason"]
    assert stats.answered == texts.count("fine")
    assert stats.answered + stats.failed == 150
    assert stats.unanswered == {}


def test_what_ends_in_preparation_names_its_files(tmp_path):
    from dataclasses import replace

    from datamodules.types import MediaRef

    found = items(["decoder dies", "decoder raises"])
    media = ((MediaRef("/data/a.mp4"), MediaRef("/data/a.mp4", 1.0, 2.0)), (MediaRef("/data/b:1.mp4"),))
    found = [replace(i, sample=replace(i.sample, videos=v)) for i, v in zip(found, media, strict=True)]
    log = RecordLog(tmp_path / "answers.jsonl")
    run(found, log)
    assert log.records["b:0"]["reason"] == "/data/a.mp4: the preparation process died 2 times (exit code 7)"
    assert log.records["b:1"]["reason"] == "b:1.mp4: damaged"  # says it itself


def test_resume_asks_the_missing_ones_only_and_again_when_the_question_changed(tmp_path):
    questions = items(["fine"] * 6)
    path = tmp_path / "answers.jsonl"
    log = RecordLog(path)
    run(questions[:4], log)
    log.close()
    changed = items(["fine", "fine too", *["fine"] * 4])
    log = RecordLog(path)
    missing = open_items(changed, log.records)
    assert [item.uid for item in missing] == ["b:1", "b:4", "b:5"]
    stats, seen = run(missing, log)
    assert seen == {"b:1", "b:4", "b:5"}
    assert stats.items == 3
    assert log.records["b:1"]["response"] == "answer to fine too"
    assert open_items(changed, log.records) == []
    assert item_digest(changed[0]) == item_digest(questions[0])
    failed = {**log.records, "b:0": {**log.records["b:0"], "state": "failed"}}
    assert [item.uid for item in open_items(changed, failed, retry_failed=True)] == ["b:0"]
    assert open_items(changed, failed) == []


def test_what_scoring_raises_reaches_the_caller_after_everything_is_written(tmp_path):
    def broken(answers):
        raise KeyError("scorer")

    log = RecordLog(tmp_path / "answers.jsonl")
    with pytest.raises(KeyError, match="scorer"):
        run(items(["fine"] * 5), log, on_answers=broken)
    assert len(read_records(tmp_path / "answers.jsonl")) == 5
