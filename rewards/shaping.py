"""Dense shaping: a small reward for being close, where the task's own reward is flat (no overlap, wrong number)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewards.base import Query
from rewards.extract.number import find_number
from rewards.extract.sections import read_answer
from rewards.extract.span import find_interval
from rewards.numerical import gold_number
from rewards.router import canonical
from rewards.temporal_grounding import gold_interval


class Closeness:
    """`weight` times 1 - distance / scale, not below 0: a term of the total for numbers and time intervals.

    The distance of two intervals is the mean distance of their ends. IoU is 0 for every interval beside the gold one;
    this term still says which of them is nearer. Other problem types, and answers in which nothing can be read, get 0.

    Example: gold [1, 3], answer [3, 4], scale 4, weight 0.2: the ends are 2 and 1 off, 0.2 * (1 - 1.5 / 4) = 0.125.

    Args:
        weight: most that the term adds.
        scale: distance from which it adds nothing: seconds for intervals, units of the answer for numbers.
        interval_types: problem types whose answers are intervals.
        number_types: problem types whose answers are numbers.
    """

    def __init__(
        self,
        weight: float = 0.2,
        scale: float = 4.0,
        interval_types: Sequence[str] = ("temporal grounding",),
        number_types: Sequence[str] = ("numerical", "regression"),
    ) -> None:
        if weight <= 0 or scale <= 0:
            raise ValueError(f"weight={weight} and scale={scale} must be positive")
        self.weight, self.scale = weight, scale
        self.intervals = frozenset(map(canonical, interval_types))
        self.numbers = frozenset(map(canonical, number_types))

    def __call__(self, query: Query) -> float:
        """Value in [0, weight]."""
        distance = self._distance(canonical(query.problem_type), query)
        if distance is None or not math.isfinite(distance):
            return 0.0
        return self.weight * max(0.0, 1.0 - distance / self.scale)

    def _distance(self, kind: str, query: Query) -> float | None:
        text = read_answer(query.response).text
        if not text:
            return None
        if kind in self.intervals:
            found, gold = find_interval(text)[0], gold_interval(query.ground_truth)
            return None if found is None else (abs(found[0] - gold[0]) + abs(found[1] - gold[1])) / 2
        if kind in self.numbers:
            number, gold = find_number(text)[0], gold_number(query.ground_truth)
            return None if number is None else abs(number.value - gold.value)
        return None
