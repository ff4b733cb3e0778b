"""GRPO (DeepSeekMath, arXiv 2402.03300) with PPO's clipped ratio; clip-higher (DAPO, arXiv 2503.14476) by setting."""

from __future__ import annotations

import torch

from lightning_modules.algorithms.base import (
    AggregationKind,
    Algorithm,
    RewardTable,
    TokenBatch,
    TokenLoss,
    group_mean,
    group_std,
)


def group_advantages(
    rewards: torch.Tensor, group: torch.Tensor, normalise_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Reward minus its group's mean, divided by the group's standard deviation (n - 1) if wanted.

    A group of equal rewards has advantage exactly 0. Example: rewards [1, 0] -> [0.7071, -0.7071].
    """
    centred = rewards - group_mean(rewards, group)
    if not normalise_std:
        return centred
    return centred / (group_std(rewards, group) + eps)


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token; with `dual_clip` c, at most -c A where A < 0.

    PPO arXiv 1707.06347, equation 7; dual clip arXiv 1912.09729, equation 5.
    """
    ratio = (logprobs - old_logprobs).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    negative = advantages < 0
    diagnostics = {
        "clip_low": (negative & (ratio < 1 - clip_low)).float(),
        "clip_high": ((advantages > 0) & (ratio > 1 + clip_high)).float(),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        diagnostics["clip_dual"] = (negative & (loss > bound)).float()
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, {name: value.detach() for name, value in diagnostics.items()})


class GRPO(Algorithm):
    """Group-relative advantages and a clipped surrogate.

    Args:
        clip_low: lower clip distance; the ratio is bounded below by 1 - clip_low.
        clip_high: upper clip distance.
        dual_clip: bound on the loss of tokens with negative advantage, > 1; None = off.
        normalise_std: divide advantages by the group's standard deviation.
        aggregation: see `Algorithm`.
        max_tokens: see `Algorithm`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        normalise_std: bool = True,
        aggregation: AggregationKind = "seq-mean-token-mean",
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(aggregation, max_tokens)
        if not 0 <= clip_low < 1 or clip_high < 0:
            raise ValueError(f"clip_low={clip_low} must lie in [0, 1) and clip_high={clip_high} be at least 0")
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"dual_clip={dual_clip} must be greater than 1 (or null)")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip
        self.normalise_std = normalise_std

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See `group_advantages`."""
        return group_advantages(rewards.total, rewards.group, self.normalise_std)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """See `clipped_surrogate`."""
        return clipped_surrogate(
            batch.logprobs, batch.old_logprobs, batch.advantages, self.clip_low, self.clip_high, self.dual_clip
        )
