"""Correct for the engine sampling from a slightly different distribution than the trainer computes.

Both run the same weights, but kernels and precisions differ; weighting by trainer / engine probability removes the
bias (truncated: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; masked:
IcePop, arXiv 2510.18855). The ratio is the policy *before* the step over the engine: PPO's own ratio stays apart.
"""

from __future__ import annotations

from typing import Literal

import torch

from lightning_modules.algorithms.base import TokenBatch


class ImportanceCorrection:
    """Weights for token losses, without gradient.

    Args:
        level: `token` uses each token's ratio, `sequence` the product over its response, `geometric` the response's
            geometric mean.
        mode: `truncate` bounds the ratio above by `high`; `mask` drops tokens whose ratio is outside [low, high].
        high: upper bound.
        low: lower bound of `mask`.
    """

    def __init__(
        self,
        level: Literal["token", "sequence", "geometric"] = "token",
        mode: Literal["truncate", "mask"] = "truncate",
        high: float = 2.0,
        low: float = 0.5,
    ) -> None:
        if level not in ("token", "sequence", "geometric"):
            raise ValueError(f"importance level={level!r}: choose token, sequence or geometric")
        if mode not in ("truncate", "mask"):
            raise ValueError(f"importance mode={mode!r}: choose truncate or mask")
        if high < 1 or not 0 <= low <= 1:
            raise ValueError(f"importance bounds must satisfy low <= 1 <= high, got low={low}, high={high}")
        self.level = level
        self.mode = mode
        self.high = high
        self.low = low

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [R], 1 where the ratio left the bounds [R]); offline tokens keep weight 1 and count for nobody's."""
        assert batch.rollout_logprobs is not None
        offline = torch.zeros_like(batch.response, dtype=torch.bool) if batch.off_policy is None else batch.off_policy
        log_ratio = (batch.old_logprobs.detach() - batch.rollout_logprobs).masked_fill(offline, 0.0)
        if self.level != "token":
            nothing = log_ratio.new_zeros(len(batch.lengths))
            total = nothing.index_add(0, batch.response, log_ratio)
            if self.level == "geometric":
                total = total / nothing.index_add(0, batch.response, (~offline).to(total.dtype)).clamp_min(1.0)
            log_ratio = total[batch.response].masked_fill(offline, 0.0)
        ratio = log_ratio.clamp(-20.0, 20.0).exp()
        outside = ratio > self.high
        if self.mode == "truncate":
            return ratio.clamp(max=self.high), outside.float()
        outside |= ratio < self.low
        return ratio.masked_fill(outside, 0.0), outside.float()
