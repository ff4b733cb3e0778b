"""Score answers as they come, with the benchmark's official rules and with training's scorer, both stored."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from eval.benchmarks.types import BenchmarkItem, ScoredItem
from eval.run.pipeline import FAILED
from rewards.base import Score

if TYPE_CHECKING:
    from eval.benchmarks.base import Benchmark
    from eval.run.records import MemoryLog
    from rewards.router import RewardRouter

log = logging.getLogger(__name__)


def answer_digest(answer: Mapping[str, Any]) -> str:
    """Short hash of an answer record; a score belongs to one answer."""
    text = f"{answer['state']}|{answer.get('response', '')}|{answer.get('reason', '')}|{answer.get('item', '')}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Scorer:
    """Scores answers and writes one record per item.

    Args:
        benchmark: knows the rules.
        router: judges; slow types in its processes, judged ones in its threads.
        scores: receives the records.
        timeout_s: seconds to wait, at the end, for the next of the verdicts that are still outstanding.
    """

    def __init__(self, benchmark: Benchmark, router: RewardRouter, scores: MemoryLog, timeout_s: float = 600.0) -> None:
        self._benchmark, self._router, self._scores, self._timeout_s = benchmark, router, scores, timeout_s
        self._waiting: list[tuple[BenchmarkItem, Mapping[str, Any], Future[Score], Future[Score]]] = []

    def submit(self, answers: Sequence[tuple[BenchmarkItem, Mapping[str, Any]]]) -> None:
        """Start scoring; verdicts that are there at once are written at once."""
        for item, answer in answers:
            if answer["state"] == FAILED:
                self._write(item, answer, "failed", answer["reason"])
                continue
            try:
                official, robust = self._benchmark.score(item, answer["response"], self._router)
            except Exception as error:  # noqa: BLE001 - untrusted text met a scorer; the item gets the reason, others go on
                log.warning("scoring %s: %s: %s", item.uid, type(error).__name__, error)
                self._write(item, answer, "failed", f"scoring failed: {type(error).__name__}: {error}")
                continue
            self._waiting.append((item, answer, official, robust))
        self._collect()

    def finish(self) -> None:
        """Wait for outstanding verdicts, as long as there is one every `timeout_s` seconds.

        What has none then is not judged, so that the next run asks again: only judges take that long.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            futures = [future for _, _, *both in self._waiting for future in both if not future.done()]
            wait(futures, timeout=left, return_when=FIRST_COMPLETED)
            if self._collect():
                deadline = time.monotonic() + self._timeout_s
        for item, answer, _, _ in self._waiting:
            self._write(item, answer, "not_judged", f"no verdict within {self._timeout_s:g} s")
        self._waiting.clear()

    def _collect(self) -> bool:
        """Write what is decided; whether there was a verdict (a judge that only fails does not prolong the wait)."""
        left, is_judged = [], False
        for item, answer, official, robust in self._waiting:
            if not (official.done() and robust.done()):
                left.append((item, answer, official, robust))
                continue
            try:
                first, second = official.result(), robust.result()
                state = self._benchmark.state(item, first, second)
            except Exception as error:  # noqa: BLE001 - as in `submit`
                self._write(item, answer, "failed", f"scoring failed: {type(error).__name__}: {error}")
                continue
            reason = "" if state == "ok" else second.reason or first.reason
            self._write(item, answer, state, reason, first, second)
            is_judged = is_judged or state != "not_judged"
        self._waiting = left
        return is_judged

    def _write(
        self,
        item: BenchmarkItem,
        answer: Mapping[str, Any],
        state: str,
        reason: str,
        official: Score | None = None,
        robust: Score | None = None,
    ) -> None:
        record = {
            "uid": item.uid,
            "answer": answer_digest(answer),
            "state": state,
            "reason": reason,
            "official": None if official is None else asdict(official),
            "robust": None if robust is None else asdict(robust),
        }
        if self._scores.records.get(item.uid) != record:
            self._scores.append(record)


def unscored(
    items: Sequence[BenchmarkItem], answers: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Mapping[str, Any]]
) -> list[tuple[BenchmarkItem, Mapping[str, Any]]]:
    """Answers that have no score of their own yet, or were not judged: there may be a judge now."""
    return [
        (item, answers[item.uid])
        for item in items
        if item.uid in answers
        and (
            scores.get(item.uid, {}).get("answer") != answer_digest(answers[item.uid])
            or scores[item.uid]["state"] == "not_judged"
        )
    ]


def scored_items(
    items: Sequence[BenchmarkItem],
    answers: Mapping[str, Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
) -> list[ScoredItem]:
    """One entry per item; an item that was never asked is failed."""
    found = []
    for item in items:
        record = scores.get(item.uid)
        if record is None:
            found.append(ScoredItem(item, "failed"))
            continue
        text = answers.get(item.uid, {}).get("response", "")
        official, robust = (Score(**verdict) if (verdict := record[mode]) else None for mode in ("official", "robust"))
        found.append(ScoredItem(item, record["state"], official, robust, text))
    return found
