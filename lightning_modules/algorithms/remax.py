"""ReMax (arXiv 2310.10505): REINFORCE with the greedy response's reward as baseline."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.base import Needs, RewardTable
from lightning_modules.algorithms.grpo import GRPO


class ReMax(GRPO):
    """A = r - r_greedy, algorithm 1. Works with one response per prompt.

    A KL penalty in the reward lowers r only, not the baseline; veRL adds it per token (return to go), here it counts
    for the whole response.
    """

    ignored = ("advantage",)

    base_needs = Needs(greedy_baseline=True)
    group_based = False

    def __init__(self, **grpo: Any) -> None:
        super().__init__(**{"aggregation": "token-mean", **grpo})

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class.

        Raises:
            ValueError: the greedy responses were not generated or not scored.
        """
        if not len(rewards.total):
            return rewards.total
        if rewards.greedy_total is None:
            raise ValueError("ReMax needs the score of one greedy response per prompt, but the batch has none")
        return rewards.total - rewards.greedy_total[rewards.group].to(rewards.total.dtype)
