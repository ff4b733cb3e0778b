"""CISPO (MiniMax-M1, arXiv 2506.13585): clip the importance weight, not the update; no token loses its gradient."""

from __future__ import annotations

from typing import Any

from lightning_modules.algorithms.base import TokenBatch, TokenLoss
from lightning_modules.algorithms.grpo import GRPO


class CISPO(GRPO):
    """-sg[clip(r, 1 - low, 1 + high)] A log pi, equations 4 and 5.

    The paper sets no lower bound (`clip_low` close to 1 has that effect) and tunes the upper one. As in the paper the
    weight is bounded on both sides whatever the advantage's sign. Equation 4 takes the token mean within a prompt's
    group; see `Algorithm`.
    """

    ignored = ("dual_clip",)

    def __init__(self, clip_low: float = 0.999, clip_high: float = 4.0, **grpo: Any) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, **{"aggregation": "token-mean", **grpo})

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """See the class."""
        ratio = (batch.logprobs - batch.old_logprobs).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        diagnostics = {"clip_low": (ratio < weight).float(), "clip_high": (ratio > weight).float()}
        return TokenLoss(-weight * batch.advantages * batch.logprobs, diagnostics)
