"""GDPO (arXiv 2601.05242): normalise every reward in its group by itself, then add, then whiten over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from datamodules.common.distributed import all_reduce
from lightning_modules.algorithms.advantage import group_mean, group_std, over_spread, whiten
from lightning_modules.algorithms.base import RewardTable
from lightning_modules.algorithms.grpo import GRPO


class GDPO(GRPO):
    """A = whiten(sum_k w_k (r_k - group mean_k) / group std_k), equations 4 to 6.

    Adding raw rewards first maps different combinations to the same advantage; normalising first keeps them apart.

    Args:
        weights: weight of every reward part by name; the parts must exist in the scores, but not in every task's:
            where a response has no such part it adds nothing.
        eps: added to each standard deviation.
        **grpo: see `GRPO`.
    """

    ignored = ("advantage",)
    reads_total = False

    def __init__(self, weights: Mapping[str, float] | None = None, eps: float = 1e-6, **grpo: Any) -> None:
        super().__init__(**grpo)
        self.weights = {"accuracy": 1.0, "format": 1.0} if weights is None else dict(weights)
        if not any(self.weights.values()):
            raise ValueError(f"GDPO weights={self.weights} leave no reward: give one part a weight other than 0")
        if eps < 0:
            raise ValueError(f"GDPO eps={eps} is added to a standard deviation and must not be negative")
        self.eps = eps
        self._seen: set[str] = set()

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class; a collective.

        Raises:
            ValueError: a weighted part has never been among the scores of any rank.
        """
        self._check_parts(rewards)
        total = torch.zeros_like(rewards.total)
        for name, weight in self.weights.items():
            if name in rewards.parts:
                values = rewards.parts[name].to(total.dtype).nan_to_num(nan=0.0)
                centred = values - group_mean(values, rewards.group)
                total = total + weight * over_spread(centred, group_std(values, rewards.group), self.eps)
        return whiten(total)

    def _check_parts(self, rewards: RewardTable) -> None:
        # Over all ranks: which tasks a rank's prompts belong to differs from step to step.
        here = torch.tensor([len(rewards.total) > 0, *(name in rewards.parts for name in self.weights)])
        scored, *present = all_reduce(here.double(), "max").bool().tolist()
        self._seen |= {name for name, found in zip(self.weights, present, strict=True) if found}
        if scored and (missing := sorted(set(self.weights) - self._seen)):
            raise ValueError(f"GDPO weights name reward parts {missing}; the scores hold {sorted(rewards.parts)}")
