"""Building blocks of advantages: group statistics, whitening over the global batch, running spread per task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from datamodules.common.distributed import all_reduce, gather
from lightning_modules.algorithms.base import RewardTable


def group_mean(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Mean of each response's group, [N] -> [N]; exactly the value where all are equal."""
    return _per_group(values, group, lambda v: v[0] + (v - v[0]).mean())


def group_std(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation (n - 1) of each response's group; 0 for a group of one.

    Exactly 0 for equal values (the offset keeps rounding of the mean out): callers ask for groups without spread.
    """
    return _per_group(values, group, lambda v: (v - v[0]).std() if len(v) > 1 else v.new_zeros(()))


def over_spread(centred: torch.Tensor, spread: torch.Tensor, eps: float) -> torch.Tensor:
    """centred / (spread + eps); 0 for values without spread, also where eps is 0."""
    return centred / (spread + eps).clamp_min(torch.finfo(centred.dtype).tiny)


def _per_group(
    values: torch.Tensor, group: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    result = torch.empty_like(values)
    for index in group.unique():
        members = group == index
        result[members] = function(values[members])
    return result


def whiten(values: torch.Tensor, weights: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """(v - mean) / std over all ranks, every value weighted by `weights`; a collective.

    The variance is the weighted population variance. Without any value anywhere, or without spread, the result is the
    centred values.

    Args:
        values: float [N] of this rank; N may be 0.
        weights: float [N], e.g. response lengths for statistics over tokens; None = 1 each.
    """
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    v, w = values.double(), weights.double()
    total = all_reduce(torch.stack([w.sum(), (w * v).sum()]))
    if total[0] == 0:
        return values
    mean = total[1] / total[0]
    variance = all_reduce((w * (v - mean).square()).sum()[None])[0] / total[0]
    return ((v - mean) / (variance.sqrt() + eps)).to(values.dtype)


class GroupAdvantage:
    """Reward minus its group's mean, scaled.

    Args:
        std: `group` divides by the group's standard deviation (GRPO), `none` does not (Dr.GRPO), `task` divides by a
            running standard deviation of the task (EMA-GRPO, OneThinker, arXiv 2512.03043).
        whiten: afterwards whiten over the global batch.
        decay: weight of the past in the running moments of `std="task"`.
        eps: added to the divisor.
    """

    def __init__(
        self,
        std: Literal["group", "none", "task"] = "group",
        whiten: bool = False,
        decay: float = 0.99,
        eps: float = 1e-6,
    ) -> None:
        if std not in ("group", "none", "task"):
            raise ValueError(f"advantage std={std!r}: choose group, none or task")
        if not 0 <= decay < 1:
            raise ValueError(f"advantage decay={decay} must lie in [0, 1)")
        if eps < 0:
            raise ValueError(f"advantage eps={eps} is added to a standard deviation and must not be negative")
        self.std = std
        self.whiten = whiten
        self.decay = decay
        self.eps = eps
        self.moments: dict[str, tuple[float, float]] = {}
        """Per task the running mean and mean square of the reward."""

    def __call__(self, values: torch.Tensor, rewards: RewardTable) -> torch.Tensor:
        """Advantages of `values` [N]; a collective when whitening or task statistics are on."""
        result = values - group_mean(values, rewards.group)
        if self.std == "group":
            result = over_spread(result, group_std(values, rewards.group), self.eps)
        elif self.std == "task":
            self._update_moments(values, rewards)
            moments = [self.moments.get(task, (math.nan, math.nan)) for task in rewards.tasks]
            spread = [max(square - mean**2, 0.0) ** 0.5 for mean, square in moments]
            std = torch.tensor(spread, dtype=torch.float64)[rewards.group]
            result = over_spread(result, std.to(values.dtype), self.eps)
        return whiten(result) if self.whiten else result

    def _update_moments(self, values: torch.Tensor, rewards: RewardTable) -> None:
        sums: dict[str, list[float]] = {}
        for index, task in enumerate(rewards.tasks):
            members = values[rewards.group == index].double()
            entry = sums.setdefault(task, [0.0, 0.0, 0.0])
            for i, amount in enumerate((float(len(members)), float(members.sum()), float(members.square().sum()))):
                entry[i] += amount
        for task, (count, total, squares) in sorted(_add_over_ranks(sums).items()):
            if not math.isfinite(squares):
                continue  # such a step is skipped; it must not stay in the moments
            new = (total / count, squares / count)
            old = self.moments.get(task, new)
            mean, square = (self.decay * o + (1 - self.decay) * n for o, n in zip(old, new, strict=True))
            self.moments[task] = (mean, square)

    def state(self) -> dict[str, Any]:
        """Running moments per task."""
        return {"moments": {task: list(pair) for task, pair in self.moments.items()}} if self.moments else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.moments = {task: (pair[0], pair[1]) for task, pair in state.get("moments", {}).items()}


def _add_over_ranks(sums: dict[str, list[float]]) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {}
    for part in gather(sums):
        for task, values in part.items():
            old = result.setdefault(task, [0.0] * len(values))
            result[task] = [a + b for a, b in zip(old, values, strict=True)]
    return result
