"""SAPO (arXiv 2511.20347): a smooth gate instead of a clip, narrower for tokens that are pushed down."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.base import TokenBatch, TokenLoss
from lightning_modules.algorithms.grpo import GRPO


class SAPO(GRPO):
    """-f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)); tau depends on the advantage's sign.

    f's slope at r = 1 is 1, so an on-policy update has GRPO's gradient.

    Args:
        tau_positive: temperature for A > 0.
        tau_negative: temperature for A <= 0; the larger, the faster the gradient fades.
        **grpo: see `GRPO`, without a clip range.
    """

    ignored = ("dual_clip", "clip_schedule")

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05, **grpo: Any) -> None:
        if useless := sorted({"clip_low", "clip_high"} & set(grpo)):
            raise ValueError(f"SAPO does not read {', '.join(useless)}: leave it out")
        super().__init__(**grpo)
        if min(tau_positive, tau_negative) <= 0:
            raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must be positive")
        self.tau_positive = tau_positive
        self.tau_negative = tau_negative

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """See the class."""
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        tau = torch.full_like(ratio, self.tau_negative).masked_fill(batch.advantages > 0, self.tau_positive)
        gate = torch.sigmoid(tau * (ratio - 1))
        weight = (4 * gate * (1 - gate)).detach()  # what is left of the gradient, 1 on policy
        return TokenLoss(-4 / tau * gate * batch.advantages, {"gate": weight})
