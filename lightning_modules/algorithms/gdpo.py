"""GDPO (arXiv 2601.05242): normalise every reward in its group by itself, then add, then whiten over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_modules.algorithms.advantage import whiten
from lightning_modules.algorithms.base import RewardTable, group_mean, group_std
from lightning_modules.algorithms.grpo import GRPO


class GDPO(GRPO):
    """A = whiten(sum_k w_k (r_k - group mean_k) / group std_k), equations 4 to 6.

    Adding raw rewards first maps different combinations to the same advantage; normalising first keeps them apart.

    Args:
        weights: weight of every reward part by name; the parts must exist in the scores.
        eps: added to each standard deviation.
        **grpo: see `GRPO`.
    """

    ignored = ("advantage",)
    reads_total = False

    def __init__(self, weights: Mapping[str, float] | None = None, eps: float = 1e-6, **grpo: Any) -> None:
        super().__init__(**grpo)
        self.weights = dict(weights or {"accuracy": 1.0, "format": 1.0})
        self.eps = eps

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class; a collective.

        Raises:
            ValueError: a weighted part is not among the scores.
        """
        missing = sorted(set(self.weights) - set(rewards.parts))
        if missing and len(rewards.total):
            raise ValueError(f"GDPO weights name reward parts {missing}; the scores hold {sorted(rewards.parts)}")
        total = torch.zeros_like(rewards.total)
        for name, weight in self.weights.items():
            if len(total):
                values = rewards.parts[name].to(total.dtype)
                centred = values - group_mean(values, rewards.group)
                total = total + weight * centred / (group_std(values, rewards.group) + self.eps)
        return whiten(total)
