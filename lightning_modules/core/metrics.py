"""Scalars that know how they are reduced: over micro-batches, then over ranks, in one collective per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from datamodules.common.distributed import all_reduce, gather

Reduction = Literal["mean", "sum", "max", "min"]

_MOMENT = "\0"
"""Marks the sums behind a correlation; never part of a metric's name."""


@dataclass
class _Entry:
    reduction: Reduction
    value: float
    """Sum for mean and sum, extremum otherwise."""
    count: float
    """Weight behind the value; 0 = nothing seen on this rank."""


class MetricBag:
    """Collect scalars during a step.

    A mean keeps sum and count, because a mean of means is wrong when ranks hold different numbers of tokens.
    Example: `bag.mean("loss", 3.0, count=2); bag.mean("loss", 1.0)` reduces to (3*2 + 1) / 3.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def mean(self, name: str, value: float, count: float = 1.0) -> None:
        """Add `count` observations whose mean is `value`."""
        entry = self._entries.setdefault(name, _Entry("mean", 0.0, 0.0))
        if count > 0:
            entry.value += float(value) * count
            entry.count += count

    def add(self, name: str, value: float) -> None:
        """Add to a sum."""
        entry = self._entries.setdefault(name, _Entry("sum", 0.0, 1.0))
        entry.value += float(value)

    def scale(self, prefix: str, factor: float) -> None:
        """Multiply the sums whose name starts with `prefix`."""
        for name, entry in self._entries.items():
            if name.startswith(prefix) and entry.reduction == "sum":
                entry.value *= factor

    def max(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._extreme(name, value, "max")

    def min(self, name: str, value: float) -> None:
        """Keep the smallest value."""
        self._extreme(name, value, "min")

    def _extreme(self, name: str, value: float, reduction: Literal["max", "min"]) -> None:
        entry = self._entries.setdefault(name, _Entry(reduction, float(value), 0.0))
        pick = max if reduction == "max" else min
        entry.value = pick(entry.value, float(value)) if entry.count else float(value)
        entry.count = 1.0

    def tokens(self, name: str, values: torch.Tensor) -> None:
        """Add the mean of `values` [R], weighted by R."""
        if values.numel():
            self.mean(name, float(values.double().mean()), values.numel())

    def correlation(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add pairs whose Pearson correlation over all ranks is wanted; undefined (absent) without variance."""
        x, y = x.double(), y.double()
        terms = {"n": torch.ones_like(x), "x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
        for term, values in terms.items():
            self.add(f"{_MOMENT}{name}{_MOMENT}{term}", float(values.sum()))

    def reduce(self, prefix: str = "") -> dict[str, float]:
        """Reduce over ranks; the result is the same on every rank. A collective: every rank calls it.

        Ranks may know different names (a rank may hold no video): the union is returned.

        Args:
            prefix: only metrics whose name starts so (correlations only without a prefix).
        """
        return _finish_correlations(self._reduce(prefix))

    def _reduce(self, prefix: str) -> dict[str, float]:
        mine = [(name, entry.reduction) for name, entry in self._entries.items() if name.startswith(prefix)]
        names = sorted({item for part in gather(mine) for item in part})
        sums = torch.zeros(len(names), 2, dtype=torch.float64)
        tops = torch.full((len(names),), -torch.inf, dtype=torch.float64)
        for i, (name, reduction) in enumerate(names):
            entry = self._entries.get(name)
            if entry is None or entry.count == 0:
                continue
            if reduction in ("mean", "sum"):
                sums[i] = torch.tensor([entry.value, entry.count], dtype=torch.float64)
            else:
                tops[i] = entry.value if reduction == "max" else -entry.value
        sums, tops = all_reduce(sums), all_reduce(tops, "max")
        result = {}
        for i, (name, reduction) in enumerate(names):
            total, count, top = float(sums[i, 0]), float(sums[i, 1]), float(tops[i])
            if reduction == "mean" and count > 0:
                result[name] = total / count
            elif reduction == "sum":
                result[name] = total
            elif reduction in ("max", "min") and top != -float("inf"):
                result[name] = top if reduction == "max" else -top
        return result


def _finish_correlations(values: dict[str, float]) -> dict[str, float]:
    result = {name: value for name, value in values.items() if not name.startswith(_MOMENT)}
    moments: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        if key.startswith(_MOMENT):
            _, name, term = key.split(_MOMENT)
            moments.setdefault(name, {})[term] = value
    for name, m in moments.items():
        covariance = m["n"] * m["xy"] - m["x"] * m["y"]
        variance_x = m["n"] * m["xx"] - m["x"] ** 2
        variance_y = m["n"] * m["yy"] - m["y"] ** 2
        if variance_x > 0 and variance_y > 0:
            result[name] = covariance / math.sqrt(variance_x * variance_y)
    return result


_WEIGHTS = ("answers_count", "responses_count")
"""Beside `x/y_mean`, `x/answers_count` says over how many answers the mean was taken."""


def merge(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Scalars of all ranks (or of all rollout batches of a step) from those of each.

    Names with the suffix `_count` are summed, `_max` maximised; all others are averaged over the parts that have
    them, weighted by the number of answers or responses that stands beside them. Means and rates are exact, the
    spread and the percentiles are averages of the parts' own.
    """
    result = {}
    for name in sorted({name for part in parts for name in part}):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name.endswith("_count"):
            result[name] = float(sum(values))
        elif name.endswith("_max"):
            result[name] = float(max(values))
        else:
            counts = [f"{name.rpartition('/')[0]}/{count}" for count in _WEIGHTS]
            weights = [next((part[count] for count in counts if part.get(count)), 1.0) for part in having]
            result[name] = float(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    return result
