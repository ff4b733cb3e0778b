"""Verdicts in the replies of judge models; a task type too, so that stored replies can be scored again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.sections import plain
from rewards.tasks.multiple_choice import MultipleChoice

Kind = Literal["binary", "correct", "option"]
LETTERS = "ABCD"
_CORRECT = re.compile(r"\b(?P<n>not\s+|isn't\s+)?(?P<i>in)?correct\b", re.IGNORECASE)
_ANSWER = re.compile(r"^\W*(?:final\s+)?answer\W*:\s*", re.IGNORECASE | re.MULTILINE)


def correct_verdict(reply: str) -> float:
    """1.0 when every "correct" or "incorrect" of the reply says correct ("not" turns it round), else 0.0."""
    said = {bool(m["n"]) == bool(m["i"]) for m in _CORRECT.finditer(plain(reply))}
    return float(said == {True})


def binary_verdict(reply: str) -> float:
    """1 when a judge's reply says "Judgement: 1", whatever the markdown, case and spacing; else 0."""
    text = re.sub(r"[*_`#]", "", reply)
    found = re.findall(r"judge?ment\s*(?:[:：=]|is)\s*[\[(\"']?\s*([01])(?![\d.]*\d)", text, re.IGNORECASE)
    if found:
        return float(found[-1])
    return float(text.strip() == "1")


def correct_word(reply: str) -> float:
    """1 for "Correct" without "Incorrect", or in front of it; case-sensitive."""
    if reply.startswith("Correct"):
        return 1.0
    return float("Correct" in reply and "Incorrect" not in reply)


def captioning_verdict(reply: str, target: str) -> float:
    """Option in the last "Answer" line equals the target's, with one option letter in it; -1 for an empty reply."""
    if not reply or reply == "invalid_request_error":
        return -1.0
    lines = [line.strip().replace("Answer:", "").strip() for line in reply.split("\n") if "Answer" in line]
    answer = lines[-1] if lines else reply
    letters = sum(answer.count(f"{letter}.") for letter in LETTERS)
    return float(letters == 1 and answer.split(". ")[0] == target.split(". ")[0])


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
