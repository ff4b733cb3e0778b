"""Benchmarks whose official verdict comes from a language model: MMVU and VCR-Bench."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.benchmarks import loading
from eval.benchmarks.base import Benchmark, submit
from eval.benchmarks.drafts import Draft
from eval.benchmarks.readers import Record
from eval.benchmarks.source import Source
from eval.benchmarks.types import BenchmarkItem

if TYPE_CHECKING:
    from rewards.base import Score
    from rewards.judge.client import Judge
    from rewards.router import RewardRouter

_LIST = re.compile(r"\[\s*-?[\d.]+(?:\s*,\s*-?[\d.]+){1,3}\s*\]")


def find_judge(router: RewardRouter) -> Judge | None:
    """The judge that the router's judged types use, or None."""
    judges = (getattr(task, "judge_model", None) for task in router.tasks.values())
    return next((judge for judge in judges if judge is not None), None)


def ask_judge(
    benchmark: Benchmark, item: BenchmarkItem, response: str, router: RewardRouter, gold: str, question: str
) -> Future[Score]:
    """The judge's verdict as right or wrong; status "not_judged" where the router has no judge or it fails.

    Args:
        benchmark: names the official scorer.
        item: the question.
        response: what is judged; thinking and tags are removed.
        router: whose judge is asked, in its threads.
        gold: reference answer as the judge sees it.
        question: question as the judge sees it.
    """
    verdict = submit(
        benchmark,
        item,
        response,
        router,
        "robust",
        problem_type="preference",
        options=(),
        ground_truth=gold,
        question=question,
    )
    return mapped(verdict, _decided)


def _decided(score: Score) -> Score:
    """Half points are a matter of training; the benchmarks know right and wrong."""
    if score.status in ("error", "timeout"):
        return replace(score, accuracy=0.0, total=0.0, status="not_judged", reason=f"the judge failed: {score.reason}")
    right = float(score.accuracy >= 0.5)
    return replace(score, accuracy=right, total=right)


def mapped(future: Future[Score], change: Callable[[Score], Score]) -> Future[Score]:
    """A future of `change(result)`."""
    result: Future[Score] = Future()

    def relay(done: Future[Score]) -> None:
        try:
            result.set_result(change(done.result()))
        except BaseException as error:  # noqa: BLE001 - lost in a callback, and the caller would wait forever
            result.set_exception(error)

    future.add_done_callback(relay)
    return result


@dataclass(frozen=True, kw_only=True)
class JudgedBenchmark(Benchmark):
    """Official verdicts by the judge for every question; the robust reading needs it for open questions only.

    Golds that are a time interval or a box are compared by rule (tIoU > 0.7, IoU > 0.5) where `rule_lists` is set.
    """

    rule_lists: bool = False
    duration_edges: Sequence[float] = ()
    """Upper ends in seconds of the duration groups, for records whose `duration` is a number."""
    type_field: str = ""
    """Field that tells open questions from choices; "" = questions without options are open."""

    def drafts(self, records: Iterable[Record], source: Source, media: loading.MediaFinder) -> Iterable[Draft]:
        """Questions without options are open; which of them need the judge is decided by the gold."""
        for record in records:
            draft = loading.plain_draft(self, record, source, media)
            if str(record.get(self.type_field, "")).startswith("open"):
                answer, known = loading.gold_of(record.get(source.answer), (), "plain")
                draft = replace(draft, texts=(), answer=answer, gold_ok=known)
            draft = replace(draft, question=without_options(draft.question, draft.texts))
            kind = self.problem_type if draft.texts else "open-ended"
            if self.duration_edges:
                group = duration_group(record.get("duration"), self.duration_edges)
                draft = replace(draft, meta={**record, "duration_group": group})
            by_rule = self.rule_lists and _LIST.fullmatch(draft.answer) is not None
            yield replace(draft, problem_type=kind, needs_judge=not by_rule)

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """(judge's verdict, rule's verdict for choices and the judge's for open questions)."""
        robust = submit(self, item, response, router, "robust")
        if not item.needs_judge:
            return robust, robust
        gold, question = judge_view(item)
        official = ask_judge(self, item, response, router, gold, question)
        return official, robust if item.sample.options else official


def without_options(question: str, texts: Sequence[str]) -> str:
    """The question alone, where the record repeats its options behind it ("Why?A. rain\\nB. sun")."""
    place = question.find(f"A. {texts[0]}") if texts else -1
    return question[:place].strip() if place > 0 else question


def duration_group(duration: Any, edges: Sequence[float]) -> str:
    """Name of the group of a duration: "0-60", "60-300", "300+"; a duration that is no number is its own group."""
    try:
        seconds = float(duration)
    except (TypeError, ValueError):
        return str(duration or "")
    low = 0.0
    for high in edges:
        if seconds <= high:
            return f"{low:g}-{high:g}"
        low = high
    return f"{low:g}+"


def judge_view(item: BenchmarkItem) -> tuple[str, str]:
    """(gold, question) as a judge has to see them: with the options and the gold option's text."""
    sample = item.sample
    question = str(sample.extra.get("question", sample.problem))
    if not sample.options:
        return sample.answer, question
    gold = next((option for option in sample.options if option.startswith(f"{sample.answer}.")), sample.answer)
    return gold, "\n".join([question, *sample.options])
