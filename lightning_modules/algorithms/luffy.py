"""LUFFY (arXiv 2504.14945): learn from offline trajectories beside one's own, with policy shaping."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.advantage import GroupAdvantage
from lightning_modules.algorithms.base import TokenBatch, TokenLoss
from lightning_modules.algorithms.grpo import GRPO


class Luffy(GRPO):
    """Mixed-policy GRPO: on-policy tokens as in GRPO; off-policy tokens -f(pi) A with f(x) = x / (x + gamma).

    The behaviour policy of an offline trajectory counts as 1 and is not clipped (equations 5 to 8); f's slope
    gamma / (pi + gamma)^2 lifts the gradient of tokens the policy finds unlikely. Groups hold both kinds of responses.

    Args:
        gamma: shaping constant (0.1 in the paper).
        **grpo: see `GRPO`; as in the paper no division by the standard deviation and a constant length divisor are
            recommended (Dr.GRPO), here the advantage's default is that.
    """

    def __init__(self, gamma: float = 0.1, **grpo: Any) -> None:
        grpo["advantage"] = grpo.get("advantage") or GroupAdvantage(std="none")
        super().__init__(**{"aggregation": "token-mean", **grpo})
        if gamma <= 0:
            raise ValueError(f"gamma={gamma} must be positive")
        self.gamma = gamma

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """See the class."""
        on_policy = super().token_loss(batch)
        if batch.off_policy is None or not bool(batch.off_policy.any()):
            # The share is a mean over all tokens of the step, also over micro-batches and ranks without such tokens.
            none = torch.zeros_like(on_policy.loss.detach())
            return TokenLoss(on_policy.loss, {**on_policy.diagnostics, "off_policy": none})
        shaped = shaped_loss(batch.logprobs, batch.advantages, self.gamma)
        off = batch.off_policy
        diagnostics = {name: value * ~off for name, value in on_policy.diagnostics.items()}
        diagnostics["off_policy"] = off.float()
        return TokenLoss(torch.where(off, shaped, on_policy.loss), diagnostics)


def shaped_loss(logprobs: torch.Tensor, advantages: torch.Tensor, gamma: float) -> torch.Tensor:
    """-f(pi) A with f(x) = x / (x + gamma), per token (equation 8)."""
    probability = logprobs.exp()
    return -probability / (probability + gamma) * advantages
