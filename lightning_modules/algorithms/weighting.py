"""What a token that the policy did not sample contributes to the loss; tokens it did sample keep the algorithm's."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from lightning_modules.algorithms.base import TokenBatch, TokenLoss
from lightning_modules.algorithms.grpo import clipped_surrogate
from lightning_modules.algorithms.luffy import shaped_loss


class OffPolicyWeighting(ABC):
    """Replaces the loss of off-policy tokens.

    Args:
        weight: factor on their loss; 0 masks them. They stay in the denominators of the loss's mean either way, so that
            the tokens beside them count the same for every weight.
    """

    needs_logprobs = False
    """Whether the behaviour policy's log-probs must be known; trajectories without them are then rejected."""

    def __init__(self, weight: float = 1.0) -> None:
        if weight < 0:
            raise ValueError(f"weight={weight} of off-policy tokens must not be negative")
        self.weight = weight

    @abstractmethod
    def token_loss(self, batch: TokenBatch, on_policy: torch.Tensor) -> torch.Tensor:
        """Loss [R] of every token as if it were off-policy; `on_policy` [R] is the algorithm's own."""

    def __call__(self, batch: TokenBatch, result: TokenLoss) -> TokenLoss:
        """`result` with the off-policy tokens' losses replaced."""
        assert batch.off_policy is not None
        loss = torch.where(batch.off_policy, self.weight * self.token_loss(batch, result.loss), result.loss)
        return TokenLoss(loss, self.diagnostics(batch, result))

    def diagnostics(self, batch: TokenBatch, result: TokenLoss) -> dict[str, torch.Tensor]:
        """The algorithm's diagnostics, of the tokens whose loss is its own."""
        assert batch.off_policy is not None
        return {name: value * ~batch.off_policy for name, value in result.diagnostics.items()}


class AsOnPolicy(OffPolicyWeighting):
    """No correction: the algorithm's own loss, as if the policy had sampled the tokens."""

    def token_loss(self, batch: TokenBatch, on_policy: torch.Tensor) -> torch.Tensor:
        """The algorithm's loss."""
        return on_policy

    def diagnostics(self, batch: TokenBatch, result: TokenLoss) -> dict[str, torch.Tensor]:
        """All of the algorithm's."""
        return dict(result.diagnostics)


class ClippedRatio(OffPolicyWeighting):
    """PPO's clipped surrogate of policy over behaviour policy, from the stored log-probs.

    Args:
        clip_low: the ratio is bounded below by 1 - clip_low.
        clip_high: and above by 1 + clip_high.
        weight: see `OffPolicyWeighting`.
    """

    needs_logprobs = True

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, weight: float = 1.0) -> None:
        super().__init__(weight)
        if not 0 <= clip_low < 1 or clip_high < 0:
            raise ValueError(f"clip_low={clip_low} must lie in [0, 1) and clip_high={clip_high} be at least 0")
        self.clip_low, self.clip_high = clip_low, clip_high

    def token_loss(self, batch: TokenBatch, on_policy: torch.Tensor) -> torch.Tensor:
        """See `clipped_surrogate`."""
        assert batch.off_policy is not None
        assert batch.rollout_logprobs is not None
        behaviour = torch.where(batch.off_policy, batch.rollout_logprobs, batch.old_logprobs.detach())
        return clipped_surrogate(
            batch.logprobs, behaviour.to(batch.logprobs.dtype), batch.advantages, self.clip_low, self.clip_high
        ).loss


class Shaped(OffPolicyWeighting):
    """LUFFY's shaping (arXiv 2504.14945): -f(pi) A, f(x) = x / (x + gamma); the behaviour policy counts as 1.

    Args:
        gamma: the smaller, the more a token counts that the policy finds unlikely.
        weight: see `OffPolicyWeighting`.
    """

    def __init__(self, gamma: float = 0.1, weight: float = 1.0) -> None:
        super().__init__(weight)
        if gamma <= 0:
            raise ValueError(f"gamma={gamma} must be positive")
        self.gamma = gamma

    def token_loss(self, batch: TokenBatch, on_policy: torch.Tensor) -> torch.Tensor:
        """See `shaped_loss`."""
        return shaped_loss(batch.logprobs, batch.advantages, self.gamma)
