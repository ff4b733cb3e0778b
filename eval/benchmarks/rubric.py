"""Benchmarks with several questions to the judge per response: MLVU's generation tasks and VCR-Bench's steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from datamodules.records import Record
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged, finished
from eval.benchmarks.drafts import Draft
from eval.benchmarks.judged import Criterion, JudgedBenchmark, Question, grade, judge_view, then
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source
from eval.benchmarks.types import BenchmarkItem, Cell
from rewards.base import Score
from rewards.extract.sections import read_answer

if TYPE_CHECKING:
    from rewards.router import RewardRouter

_START = re.compile(r"^\s*(?:#+\s*)?(?:\**\s*(?:step\s*)?\d+\s*[.:)]|[-*\u2022])\s*\**\s*", re.IGNORECASE)
MAX_STEPS = 35
"""The official prompt of VCR-Bench allows as many steps of a response."""
_REDUNDANT = (0.25, 0.75)
"""Between these lies the grade of a redundant step, which is in no denominator."""


@dataclass(frozen=True, kw_only=True)
class RubricBenchmark(Benchmark):
    """Open questions of several tasks; an answer gets the sum of its task's criteria, each from 1 to 5.

    MLVU's generation tasks (Zhou et al., 2024): the official script asks for both criteria in one call; here every
    criterion, and every scoring point of a sub-scene, is a call of its own, and the mean over the points is computed
    instead of estimated by the judge.
    """

    criteria: Mapping[str, Sequence[Criterion]]
    """Task -> its two criteria. A record belongs to the task that its `_task` names, else to the first."""

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """Open questions, with the references of the criteria that have several."""
        for record in records:
            draft = self.draft(record, source, media)
            named = str(record.get("_task"))
            task = next((name for name in self.criteria if name in named), next(iter(self.criteria)))
            lists = {c.each: tuple(map(str, record.get(c.each) or ())) for c in self.criteria[task] if c.each}
            yield replace(
                draft,
                problem_type="open-ended",
                needs_judge=True,
                meta={**record, "task": task},
                extra=lists,
            )

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """The judge's sum of the criteria as a share of the most that can be reached."""
        answer = read_answer(response).text.strip()
        if not answer:
            empty = finished(Score(0.0, 0.0, 0.0, status="unparsable", reason="empty answer"))
            return empty, empty
        sample = item.sample
        question, gold = str(sample.extra["question"]), sample.answer
        asked = [
            Question(criterion, question, reference, answer)
            for criterion in self.criteria[item.meta["task"]]
            for reference in (sample.extra.get(criterion.each) or (gold,))
        ]
        verdict = grade(router, asked, _points)
        return verdict, verdict

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """The mean of the tasks, each task (0 to 10, an item without an answer counts 0) and the criteria (1 to 5)."""
        tasks: dict[str, float | None] = {}
        cells: dict[str, Cell] = {}
        for task, criteria in self.criteria.items():
            part = [entry for entry in judged if entry.item.meta["task"] == task]
            value = metrics.mean(entry.value for entry in part).value
            tasks[task] = None if value is None else value / 10
            for name in (criterion.name for criterion in criteria):
                scores = [e.score.parts[name] for e in part if e.score is not None and name in e.score.parts]
                if scores:
                    cells[name] = Cell(sum(scores) / len(scores), len(scores))
        return {self.metric: metrics.mean_of(tasks.values()), **tasks}, {"criteria": cells} if cells else {}


def _points(grades: dict[str, list[float]]) -> Score:
    """Grades from 0 to 1 become points from 1 to 5; those of one criterion (scoring points) are averaged."""
    parts = {name: 1 + 4 * sum(values) / len(values) for name, values in grades.items()}
    share = sum(parts.values()) / 10
    return Score(share, share, share, parts=parts)


@dataclass(frozen=True, kw_only=True)
class VCRBenchSteps(JudgedBenchmark):
    """VCR-Bench with the steps of the reasoning judged, too (Qi et al., 2025).

    Recall: share of the reference's steps that the response holds. Precision: share of its steps that are right.
    The official script lets the judge cut the response into steps and tell their kinds in one call; here its lines are
    the steps, each judged alone, so that any judge can do it; redundant ones do not count. Averages as official: over
    items, F1 from the two averages.
    """

    recall: Criterion
    """Asked about each step of the reference, with the whole response."""
    precision: Criterion
    """Asked about each step of the response, with the whole reference."""

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """The verdict on the answer, with recall and precision among its parts."""
        official, robust = super().score(item, response, router)
        reference = steps(item.meta.get("reasoning"))
        said = steps(response.replace("<think>", "\n").replace("</think>", "\n"))
        if not reference or not said:
            return official, robust
        _, question = judge_view(item)
        whole = "\n".join(reference)
        asked = [Question(self.recall, question, step, response) for step in reference]
        asked += [Question(self.precision, question, whole, step) for step in said]

        def with_parts(verdict: Score, shares: Score) -> Score:
            return replace(verdict, parts={**verdict.parts, **shares.parts})

        return then(with_parts, official, grade(router, asked, self._shares)), robust

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """Those of VCR-Bench and `recall`, `precision`, `f1` in percent, where steps have been judged."""
        headline, tables = super().figures(judged)
        means: dict[str, float | None] = {}
        for name in ("recall", "precision"):
            values = [e.score.parts[name] for e in judged if e.score is not None and name in e.score.parts]
            # An item without a response has no step of the reference; of its own it has none that could be wrong.
            failed = [0.0 for e in judged if e.score is None and e.value == 0.0] if name == "recall" and values else []
            means[name] = metrics.mean([*values, *failed]).value
        recall, precision, f1 = means["recall"], means["precision"], None
        if recall is not None and precision is not None:
            both = recall + precision
            f1 = 2 * recall * precision / both if both else 0.0
        return {**headline, **means, "f1": f1}, tables

    def _shares(self, grades: dict[str, list[float]]) -> Score:
        low, high = _REDUNDANT
        held = grades[self.recall.name]
        counted = [value >= high for value in grades.get(self.precision.name, ()) if not low < value < high]
        parts = {"recall": sum(value >= 0.5 for value in held) / len(held)}
        if counted:
            parts["precision"] = sum(counted) / len(counted)
        return Score(0.0, 0.0, 0.0, parts=parts)


def steps(text: Any) -> list[str]:
    """The steps of a reasoning: the entries of a list, else its non-empty lines without their numbers.

    Example: `steps("1. A man enters.\\n2. He sits.") == ["A man enters.", "He sits."]`.
    """
    if isinstance(text, str) and text.lstrip().startswith("["):
        try:
            text = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            text = str(text)
    lines = [str(entry) for entry in text] if isinstance(text, (list, tuple)) else str(text or "").splitlines()
    found = [_START.sub("", line).strip() for line in lines]
    return [line for line in found if line][:MAX_STEPS]
