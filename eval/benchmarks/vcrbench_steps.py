"""VCR-Bench with the steps of the reasoning judged, too: recall, precision and F1 (Qi et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eval.benchmarks.base import Figures, Judged
from eval.benchmarks.judged import JudgedBenchmark, judge_view
from eval.benchmarks.rubric import Criterion, Question, grade, joined, steps
from eval.benchmarks.types import BenchmarkItem

if TYPE_CHECKING:
    from rewards.base import Score
    from rewards.router import RewardRouter

_RECALL = Criterion(
    "recall",
    "You are given a question about a video, one step of its reference solution as the reference answer, and a whole "
    "solution to grade. 1 = the solution says the content of the step, with all its details and values, or it follows "
    "from it directly; 0 = it does not.",
)
_PRECISION = Criterion(
    "precision",
    "You are given a question about a video, its reference solution as the reference answer, and one step of another "
    "solution to grade. 1 = the step agrees with the reference (times may differ by 3 seconds) or is a valid, useful "
    "inference that contradicts nothing in it; 0 = it is wrong or contradicts it; 0.5 = it only repeats the question "
    "or does not help to solve it.",
)
_REDUNDANT = (0.25, 0.75)
"""Between these lies the grade of a redundant step, which is in no denominator."""


@dataclass(frozen=True, kw_only=True)
class VCRBenchSteps(JudgedBenchmark):
    """Recall: share of the reference's steps that the response holds. Precision: share of its steps that are right.

    The official script lets the judge cut the response into steps and tell their kinds in one call; here its lines are
    the steps, each judged alone, so that any judge can do it; redundant ones do not count. Averages as official: over
    items, F1 from the two averages.
    """

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """The verdict on the answer, with recall and precision among its parts."""
        official, robust = super().score(item, response, router)
        reference = steps(item.meta.get("reasoning"))
        said = steps(response.replace("<think>", "\n").replace("</think>", "\n"))
        if not reference or not said:
            return official, robust
        _, question = judge_view(item)
        whole = "\n".join(reference)
        asked = [Question(_RECALL, question, step, response) for step in reference]
        asked += [Question(_PRECISION, question, whole, step) for step in said]
        return joined(official, grade(router, asked, _shares), _with_parts), robust

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """Those of VCR-Bench and `recall`, `precision`, `f1` in percent, where steps have been judged."""
        headline, tables = super().figures(judged)
        means: dict[str, float | None] = {}
        for name in ("recall", "precision"):
            values = [e.score.parts[name] for e in judged if e.score is not None and name in e.score.parts]
            # An item without a response has no step of the reference; of its own it has none that could be wrong.
            failed = [0.0 for e in judged if e.score is None and e.value == 0.0] if name == "recall" and values else []
            means[name] = 100 * sum(values) / (len(values) + len(failed)) if values else None
        recall, precision = means["recall"], means["precision"]
        both = None if recall is None or precision is None else recall + precision
        means["f1"] = None if both is None else 2 * recall * precision / both if both else 0.0
        return {**headline, **means}, tables


def _shares(grades: dict[str, list[float]]) -> Score:
    from rewards.base import Score

    low, high = _REDUNDANT
    counted = [value >= high for value in grades.get("precision", ()) if not low < value < high]
    parts = {"recall": sum(value >= 0.5 for value in grades["recall"]) / len(grades["recall"])}
    if counted:
        parts["precision"] = sum(counted) / len(counted)
    return Score(0.0, 0.0, 0.0, parts=parts)


def _with_parts(verdict: Score, shares: Score) -> Score:
    return replace(verdict, parts={**verdict.parts, **shares.parts})
