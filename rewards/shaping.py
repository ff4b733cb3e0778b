"""Dense shaping: a small reward for being close, where the task's own reward is flat (no overlap, wrong number)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewards.base import Query
from rewards.extract.number import find_number
from rewards.extract.sections import read_answer
from rewards.extract.span import find_interval
from rewards.router import canonical
from rewards.tasks.numerical import gold_number
from rewards.tasks.temporal_grounding import gold_interval


class Closeness:
    """`weight` times 1 - distance / scale, not below 0: a term of the total for numbers and time intervals.

    For an interval it is the mean over the two ends. IoU is 0 for every interval beside the gold one, and depends on
    both ends at once; this term says which interval is nearer, and gives each end its own credit. With a scale of one
    step of the answers, only exact ends count. Other problem types, and answers in which nothing can be read, get 0.

    Example: gold [1, 3], answer [3, 4], scale 4, weight 0.2: the ends are 2 and 1 off, 0.2 * (0.5 + 0.75) / 2 = 0.125.

    Args:
        weight: most that the term adds.
        scale: distance from which an end or number adds nothing: seconds for intervals, units of the answer for
            numbers.
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
        distances = self._distances(canonical(query.problem_type), query)
        if not distances or not all(map(math.isfinite, distances)):
            return 0.0
        return self.weight * sum(max(0.0, 1.0 - d / self.scale) for d in distances) / len(distances)

    def _distances(self, kind: str, query: Query) -> list[float]:
        """Distance of each number of the answer from its gold value; empty when nothing can be read."""
        text = read_answer(query.response).text
        if not text:
            return []
        if kind in self.intervals:
            found, ends = find_interval(text)[0], gold_interval(query.ground_truth)
            return [] if found is None else [abs(f - g) for f, g in zip(found, ends, strict=True)]
        if kind in self.numbers:
            number, gold = find_number(text)[0], gold_number(query.ground_truth)
            return [] if number is None else [abs(number.value - gold.value)]
        return []
