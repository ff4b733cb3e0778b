"""Reading verdicts out of a judge model's reply; also a task type, so that stored replies can be scored again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.sections import plain
from rewards.official.judged import binary_verdict
from rewards.tasks.multiple_choice import MultipleChoice

Kind = Literal["binary", "correct", "option"]


_CORRECT = re.compile(r"\b(?P<n>not\s+|isn't\s+)?(?P<i>in)?correct\b", re.IGNORECASE)
_ANSWER = re.compile(r"^\W*(?:final\s+)?answer\W*:\s*", re.IGNORECASE | re.MULTILINE)


def correct_verdict(reply: str) -> float:
    """1.0 when every "correct" or "incorrect" of the reply says correct ("not" turns it round), else 0.0."""
    said = {bool(m["n"]) == bool(m["i"]) for m in _CORRECT.finditer(plain(reply))}
    return float(said == {True})


class JudgeReply(TaskReward):
    """Scores the reply of a judge rather than an answer.

    Args:
        aliases: further names of the problem type.
        kind: binary = "Judgement: 1"; correct = the word Correct or Incorrect; option = the option after "Answer:".
    """

    def __init__(self, aliases: Sequence[str] = (), kind: Kind = "binary") -> None:
        super().__init__(aliases)
        if kind not in ("binary", "correct", "option"):
            raise ValueError(f"kind={kind!r}: use binary, correct or option")
        self.kind = kind

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy 1.0 or 0.0."""
        if self.kind == "option":
            stated = _ANSWER.split(answer)[-1].strip()
            return MultipleChoice().judge(query, stated) if stated else unparsable("the judge gave no reply")
        return Verdict(binary_verdict(answer) if self.kind == "binary" else correct_verdict(answer))
