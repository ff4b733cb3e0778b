"""RLOO (arXiv 2402.14740): each response's baseline is the mean of its siblings."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.advantage import group_mean
from lightning_modules.algorithms.base import RewardTable
from lightning_modules.algorithms.grpo import GRPO


class RLOO(GRPO):
    """A_i = r_i - mean of the other n - 1 rewards = n / (n - 1) (r_i - group mean); unbiased, not scaled.

    The paper's gradient is that of whole responses (the sum over their tokens); the token mean differs from it by one
    factor for the whole batch. TRL's and veRL's advantages are the same.
    """

    ignored = ("advantage",)

    def __init__(self, **grpo: Any) -> None:
        super().__init__(**{"aggregation": "token-mean", **grpo})

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class; a group of one has advantage 0."""
        size = rewards.group_size()
        centred = rewards.total - group_mean(rewards.total, rewards.group)
        return centred * size / (size - 1).clamp_min(1)
