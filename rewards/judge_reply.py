"""Reading verdicts out of a judge model's reply; also a task type, so that stored replies can be scored again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.official.judged import binary_verdict, correct_word, tempcompass

Kind = Literal["binary", "correct", "option"]


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
            rating = tempcompass(query)
            return unparsable("the judge gave no reply") if rating is None or rating < 0 else Verdict(rating)
        return Verdict(binary_verdict(answer) if self.kind == "binary" else correct_word(answer))
