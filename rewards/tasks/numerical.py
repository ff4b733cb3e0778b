"""Numerical answers: equality after a sane parse (numerical, counting) and mean relative accuracy (regression)."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.number import Number, find_number, parse_number

THRESHOLDS = tuple(Fraction(k, 100) for k in range(50, 100, 5))


def gold_number(gold: Any) -> Number:
    """The gold number. Raises ValueError when there is none or it is not finite."""
    number = Number(float(gold), str(gold), 0, 0) if isinstance(gold, (int, float)) else parse_number(str(gold))
    if number is None:
        number = find_number(str(gold))[0]
    if number is None or not math.isfinite(number.value):
        raise ValueError(f"the gold answer {gold!r} is not a finite number")
    return number


def decimals(text: str) -> int:
    """Decimal places of a number as written: "3.14" has 2, "1.5e-4" has 5, "1/3" counts as 2."""
    try:
        exponent = Decimal(text.replace(",", "").strip(" $%")).as_tuple().exponent
    except InvalidOperation:
        return 2
    return max(0, -exponent) if isinstance(exponent, int) else 2


def numbers_agree(answer: Number, gold: Number) -> bool:
    """Whether both are equal when rounded to two decimals, or to as many as the gold answer has.

    "50%" agrees with 50 and, where only one of the two is a percentage, with 0.5.
    """
    if not math.isfinite(answer.value):
        return False
    tolerance = 0.5 * 10.0 ** -max(2, decimals(gold.text))
    slack = tolerance * 1e-6 + 1e-12 * abs(gold.value)

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= tolerance + slack

    if close(answer.value, gold.value):
        return True
    if answer.percent != gold.percent:
        small, large = (answer.value, gold.value) if gold.percent else (gold.value, answer.value)
        return abs(small * 100 - large) <= max(tolerance, 0.5e-2) + slack
    return False


def mean_relative_accuracy(predicted: float, gold: float) -> float:
    """Share of the ten thresholds theta in .50, .55, ..., .95 with |p - t| / |t| <= 1 - theta, in exact arithmetic.

    Thinking in Space (arXiv 2412.14171). Both numbers are taken as the decimals they print as, so that a relative
    error of exactly 0.20 passes the threshold 0.80. A gold of 0 accepts 0 only.
    """
    if not (math.isfinite(predicted) and math.isfinite(gold)):
        return 0.0
    p, t = Fraction(repr(predicted)), Fraction(repr(gold))
    if t == 0:
        return float(p == 0)
    error = abs(p - t) / abs(t)
    return sum(error <= 1 - theta for theta in THRESHOLDS) / len(THRESHOLDS)


class Numerical(TaskReward):
    """1 when the number agrees with the gold to two decimals (more where the gold has more), else 0."""

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy 1.0 or 0.0; alternatives ("12 or 13") are unparsable."""
        gold = gold_number(query.ground_truth)
        number, reason = find_number(answer)
        return unparsable(reason) if number is None else Verdict(float(numbers_agree(number, gold)))

    def well_formed(self, query: Query, answer: str) -> bool:
        """One number, with a unit at most."""
        return len(answer) <= 40 and parse_number(answer) is not None


class Regression(Numerical):
    """Mean relative accuracy over ten thresholds; a range counts as its first number."""

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in {0, 0.1, ..., 1}."""
        gold = gold_number(query.ground_truth)
        number, reason = find_number(answer, allow_range=True)
        if number is None:
            return unparsable(reason)
        return Verdict(mean_relative_accuracy(number.value, gold.value))
