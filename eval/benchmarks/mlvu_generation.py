"""MLVU's generation tasks: sub-scene captions and summaries, graded by the judge (Zhou et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eval.benchmarks import loading, metrics
from eval.benchmarks.base import Benchmark, Figures, Judged, finished
from eval.benchmarks.drafts import Draft
from eval.benchmarks.readers import Record
from eval.benchmarks.rubric import Criterion, Question, grade
from eval.benchmarks.source import Source
from eval.benchmarks.types import BenchmarkItem, Cell

if TYPE_CHECKING:
    from rewards.base import Score
    from rewards.router import RewardRouter

SUB_SCENE, SUMMARY = "sub_scene", "summary"
CRITERIA = {SUB_SCENE: ("accuracy", "relevance"), SUMMARY: ("completeness", "reliability")}
"""Task -> its two official criteria, each from 1 to 5."""

_POINT = Criterion(
    "accuracy",
    "You grade whether an answer to a question about a video contains one scoring point, which is the reference "
    "answer: 1 = it says exactly that, 0.5 = it mentions something related that is not quite right, 0 = it misses it.",
)
_RELEVANCE = Criterion(
    "relevance",
    "You grade how far an answer keeps to its question about a video; whether it is right does not matter: 1 = only "
    "about the question and sure of itself, 0.75 = mostly about the question and rather sure, 0.5 = about the question "
    "but unsure of itself, 0.25 = partly, with much that does not belong there, 0 = about something else.",
)
_COMPLETENESS = Criterion(
    "completeness",
    "You grade how much of the reference summary of a video another summary covers: 1 = all main points, 0.75 = nearly "
    "all, 0.5 = most, 0.25 = some, with many left out, 0 = hardly any.",
)
_RELIABILITY = Criterion(
    "reliability",
    "You grade how correct and clear a summary of a video is, given a reference summary. Reasonable details that the "
    "reference lacks and that do not contradict it are no errors. 1 = no error, clear, 0.75 = negligible inaccuracies, "
    "0.5 = minor errors, mostly clear, 0.25 = several errors or contradictions, 0 = many, confusing.",
)


@dataclass(frozen=True, kw_only=True)
class MLVUGeneration(Benchmark):
    """G-Avg: the mean of both tasks, each the sum of two criteria from 1 to 5, averaged over its items.

    The official script asks for both criteria in one call; here every criterion, and every scoring point of a
    sub-scene, is a call of its own, and the mean over the points is computed instead of estimated by the judge.
    """

    def drafts(self, records: Iterable[Record], source: Source, media: loading.MediaFinder) -> Iterable[Draft]:
        """Open questions with their scoring points."""
        for record in records:
            draft = loading.plain_draft(self, record, source, media)
            points = tuple(str(point) for point in record.get("scoring_points") or ())
            task = SUMMARY if SUMMARY in str(record.get("_task")) else SUB_SCENE
            yield replace(
                draft,
                problem_type="open-ended",
                needs_judge=True,
                meta={**record, "task": task},
                extra={"scoring_points": points},
                gold_ok=draft.gold_ok and (task == SUMMARY or bool(points or draft.answer)),
            )

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """The judge's sum of the two criteria, from 2 to 10, as a share of 10."""
        from rewards.base import Score
        from rewards.extract.sections import read_answer

        answer = read_answer(response).text.strip()
        if not answer:
            empty = finished(Score(0.0, 0.0, 0.0, status="unparsable", reason="empty answer"))
            return empty, empty
        question = str(item.sample.extra["question"])
        gold = item.sample.answer
        if item.meta["task"] == SUB_SCENE:
            points = tuple(item.sample.extra["scoring_points"]) or (gold,)
            asked = [Question(_POINT, question, point, answer) for point in points]
            asked.append(Question(_RELEVANCE, question, gold, answer))
        else:
            asked = [Question(criterion, question, gold, answer) for criterion in (_COMPLETENESS, _RELIABILITY)]
        verdict = grade(router, asked, _sum)
        return verdict, verdict

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`G-Avg`, both tasks (0 to 10, an item without an answer counts 0) and the criteria (1 to 5)."""
        tasks: dict[str, float | None] = {}
        criteria: dict[str, Cell] = {}
        for task, names in CRITERIA.items():
            part = [entry for entry in judged if entry.item.meta["task"] == task]
            value = metrics.mean(entry.value for entry in part).value
            tasks[task] = None if value is None else value / 10
            for name in names:
                scores = [e.score.parts[name] for e in part if e.score is not None and name in e.score.parts]
                if scores:
                    criteria[name] = Cell(sum(scores) / len(scores), len(scores))
        return {"G-Avg": metrics.mean_of(tasks.values()), **tasks}, {"criteria": criteria} if criteria else {}


def _sum(grades: dict[str, list[float]]) -> Score:
    """Grades from 0 to 1 become points from 1 to 5; those of one criterion (scoring points) are averaged."""
    from rewards.base import Score

    parts = {name: 1 + 4 * sum(values) / len(values) for name, values in grades.items()}
    share = sum(parts.values()) / 10
    return Score(share, share, share, parts=parts)
