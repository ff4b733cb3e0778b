"""REINFORCE++ and its group-baseline form (arXiv 2501.03262): advantages normalised over the global batch."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.advantage import group_mean, whiten
from lightning_modules.algorithms.base import RewardTable
from lightning_modules.algorithms.grpo import GRPO


class ReinforcePP(GRPO):
    """Advantage = reward, whitened over all tokens of the global batch; PPO clip; no critic, no group.

    Statistics weight every response by its length, as veRL's masked whitening over tokens does (the paper says batch
    mean and standard deviation without naming the unit); the population variance, where veRL corrects by
    tokens / (tokens - 1). A KL penalty in the reward acts on the whole response, where the paper gives each token the
    penalty of those behind it.
    """

    ignored = ("advantage",)

    group_based = False

    def __init__(self, **grpo: Any) -> None:
        super().__init__(**{"aggregation": "token-mean", **grpo})

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class."""
        return whiten(rewards.total, rewards.lengths)


class ReinforcePPBaseline(ReinforcePP):
    """The same with the group's mean subtracted first, for several responses per prompt."""

    group_based = True

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class."""
        return whiten(rewards.total - group_mean(rewards.total, rewards.group), rewards.lengths)
