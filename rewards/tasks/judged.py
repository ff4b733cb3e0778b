"""Task types that a language model judges: preference (critic), and open-ended answers where a judge is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rewards.base import Lane, Query, TaskReward, Verdict, unparsable
from rewards.judge.client import Judge, JudgeError
from rewards.tasks.multiple_choice import MultipleChoice
from rewards.tasks.open_ended import OpenEnded


def ask(judge: Judge | None, query: Query, answer: str) -> Verdict:
    """The judge's verdict. Status "not_judged" without a judge, "error" when it fails; ValueError for an empty gold."""
    gold = str(query.ground_truth).strip()
    if not gold:
        raise ValueError("the gold answer is empty")
    if not answer.strip():
        return unparsable("empty answer")
    if judge is None:
        return Verdict(0.0, "not_judged", f"no judge is configured for {query.problem_type!r}")
    question = str(query.fields.get("question") or query.fields.get("problem") or "")
    try:
        grade = judge.grade(question, gold, answer)
    except JudgeError as error:
        return Verdict(0.0, "error", str(error)[:500])
    return Verdict(grade.score, reason=grade.reason, parts={"judge_score": grade.score})


class Preference(TaskReward):
    """Critic tasks (LLaVA-Critic): which of several responses is better, or how good one is.

    A gold that is one of the record's options (a pairwise verdict) is compared exactly and needs no judge; any other
    critique is judged against the reference critique.

    Args:
        aliases: further names of the problem type.
        judge: the judge; None = the router's, where it has one.
    """

    lane: ClassVar[Lane] = "thread"

    def __init__(self, aliases: Sequence[str] = (), judge: Judge | None = None) -> None:
        super().__init__(aliases)
        self.judge_model = judge

    def judge(self, query: Query, answer: str) -> Verdict:
        """Compare labels, else ask the judge."""
        return MultipleChoice().judge(query, answer) if query.options else ask(self.judge_model, query, answer)


class JudgedOpenEnded(OpenEnded):
    """Open-ended answers by the judge; golds that are a number, an interval or a box are compared by rule.

    Args:
        aliases: further names of the problem type.
        markers: as in `OpenEnded`.
        judge: the judge; None = the router's, where it has one.
    """

    lane: ClassVar[Lane] = "thread"

    def __init__(
        self,
        aliases: Sequence[str] = (),
        markers: Mapping[str, str] | None = None,
        judge: Judge | None = None,
    ) -> None:
        super().__init__(aliases, markers)
        self.judge_model = judge

    def free_text(self, query: Query, answer: str, gold: str) -> Verdict:
        """Ask the judge."""
        return ask(self.judge_model, query, answer)
