"""Supervised fine-tuning as the simplest policy gradient: every given token has advantage one."""

from __future__ import annotations

import torch

from lightning_modules.algorithms.base import Algorithm, RewardTable, TokenBatch, TokenLoss


class Supervised(Algorithm):
    """Negative log-likelihood per token."""

    group_based = False
    reads_rewards = False
    reads_total = False

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """One for every response."""
        return torch.ones_like(rewards.total)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """-log p of each target token."""
        return TokenLoss(-batch.logprobs)
