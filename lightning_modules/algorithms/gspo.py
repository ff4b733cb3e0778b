"""GSPO (arXiv 2507.18071): one importance ratio per response, the geometric mean of its token ratios."""

from __future__ import annotations

from typing import Any

from lightning_modules.algorithms.base import TokenBatch, TokenLoss
from lightning_modules.algorithms.grpo import GRPO, clipped_surrogate


class GSPO(GRPO):
    """Sequence ratio s = exp(mean_t(log pi - log pi_old)), equation 7; clipped as in PPO, equation 5.

    Every token carries its response's ratio; the mean over tokens of a response gives it back once, so the default
    aggregation is exactly equation 5. Clip distances are far smaller than GRPO's (3e-4 and 4e-4 in the paper).
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, **grpo: Any) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, **grpo)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """-min(s A, clip(s) A) per token, the gradient through the whole response."""
        log_ratio = batch.response_mean(batch.logprobs - batch.old_logprobs)[batch.response]
        return clipped_surrogate(
            log_ratio, log_ratio.new_zeros(()), batch.advantages, self.clip_low, self.clip_high, self.dual_clip
        )


class GSPOToken(GSPO):
    """GSPO-token: value of the sequence ratio, gradient of each token's own log-prob (equations 13 and 14).

    Equals GSPO where all tokens of a response weigh the same; differs where they do not (token-level importance
    weights, prefixes of an offline trajectory).
    """

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """-min(s_t A_t, clip(s_t) A_t) with s_t = sg[s] pi_t / sg[pi_t]."""
        mean = batch.response_mean(batch.logprobs - batch.old_logprobs).detach()[batch.response]
        # The difference is exactly 0, so that every token has its response's ratio to the last bit: the clip is narrow.
        log_ratio = mean + (batch.logprobs - batch.logprobs.detach())
        return clipped_surrogate(
            log_ratio, log_ratio.new_zeros(()), batch.advantages, self.clip_low, self.clip_high, self.dual_clip
        )
