"""Math: symbolic equality of the answer and the gold, by math-verify, in the pool of killable processes.

math-verify's own time limits use SIGALRM, which works in main threads only and cannot stop a C loop; they are off here
and the pool kills what takes too long.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from rewards.base import Lane, Query, TaskReward, Verdict, unparsable
from rewards.extract.sections import boxed
from rewards.tasks.open_ended import stated_answer

MAX_CHARS = 1_000
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]{0,200})\}")
_FRAC = re.compile(r"^(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$")
_PLAIN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\.\d+")


def final_expression(answer: str) -> str:
    """What is compared: the last boxed content, else what follows "the answer is", else the last line."""
    boxes = boxed(answer)
    if boxes:
        return boxes[-1][1].strip()
    stated = stated_answer(_TEXT.sub(r" \1 ", answer)).strip()
    lines = [line.strip() for line in stated.splitlines() if line.strip()]
    return lines[-1].strip("*_` ").rstrip(".。* ").strip() if lines else ""


def plain_fraction(text: str) -> Fraction | None:
    """Exact value of a plain number ("-3", "1,200", "0.25", "3/4", "\\frac{3}{4}"), None for anything else."""
    text = _FRAC.sub(r"\1\2/\3", text.strip().strip("$").strip())
    match = _PLAIN.fullmatch(text)
    if not match or len(text) > 60:
        return None
    try:
        return Fraction(text.replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


@lru_cache(maxsize=8192)
def _parsed(text: str) -> Any:
    """Symbolic forms of `text`; boxed, so that the whole expression is read rather than the last number in it."""
    from math_verify import parse

    body = text.strip().strip("$").strip()
    if body.startswith(("\\(", "\\[")) and body.endswith(("\\)", "\\]")):
        body = body[2:-2].strip()
    return parse(f"\\boxed{{{body}}}", parsing_timeout=None) or parse(text, parsing_timeout=None)


@lru_cache(maxsize=8192)
def _equal(gold: str, text: str) -> bool | None:
    """Whether both are equal, None when `text` is not an expression; the responses of a group repeat each other."""
    from math_verify import verify

    target = _parsed(gold)
    if not target:
        raise ValueError(f"the gold answer {gold[:80]!r} is not a mathematical expression")
    found = _parsed(text)
    return bool(verify(target, found, timeout_seconds=None)) if found else None


class MathAnswer(TaskReward):
    """1 when both expressions are equal (numbers, sets, intervals, matrices, equations), else 0.

    Args:
        aliases: further names of the problem type.
        seconds: time limit of one judgement.
    """

    lane: ClassVar[Lane] = "process"

    def __init__(self, aliases: Sequence[str] = (), seconds: float = 5.0) -> None:
        super().__init__(aliases)
        if seconds <= 0:
            raise ValueError(f"seconds={seconds} must be positive")
        self.seconds = seconds

    def time_limit(self, query: Query) -> float:
        """Seconds after which the judgement is killed."""
        return self.seconds

    def warm_up(self) -> None:
        """Import sympy and the LaTeX grammar."""
        # Two warnings per call would say that time limits are off; the pool has its own.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.judge(Query("2", "x+1", "math"), "\\boxed{\\sqrt{2}}")

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy 1.0 or 0.0. Raises ValueError when the gold is not an expression."""
        gold = final_expression(str(query.ground_truth))
        if not gold:
            raise ValueError("the gold answer is empty")
        text = final_expression(answer)
        if not text:
            return unparsable("no expression in the answer")
        if len(text) > MAX_CHARS:
            return unparsable(f"the final expression has {len(text)} characters, more than {MAX_CHARS}")
        if re.sub(r"[\s$]", "", text) == re.sub(r"[\s$]", "", gold):
            return Verdict(1.0)
        ours, theirs = plain_fraction(text), plain_fraction(gold)
        if ours is not None and theirs is not None:
            return Verdict(float(ours == theirs))
        equal = _equal(gold, text)
        return unparsable("the answer is not a mathematical expression") if equal is None else Verdict(float(equal))

    def well_formed(self, query: Query, answer: str) -> bool:
        """A short expression, boxed or not."""
        return 0 < len(final_expression(answer)) <= 200
