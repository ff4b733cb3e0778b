"""GRPO (DeepSeekMath, arXiv 2402.03300) with PPO's clipped ratio; clip-higher (DAPO, arXiv 2503.14476) by setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_modules.algorithms.advantage import GroupAdvantage
from lightning_modules.algorithms.base import AggregationKind, Algorithm, RewardTable, TokenBatch, TokenLoss
from lightning_modules.algorithms.kl import KLPenalty


@dataclass(frozen=True)
class ClipSchedule:
    """Move the clip range linearly from the algorithm's own to this one.

    Example: clip_high 0.2 and `ClipSchedule(low=0.2, high=0.4, steps=100)` give 0.3 at step 50.
    """

    low: float
    """clip_low at the end."""
    high: float
    """clip_high at the end."""
    steps: int
    """RL steps until the end."""

    def __post_init__(self) -> None:
        check_clip_range(self.low, self.high, "clip_schedule.low", "clip_schedule.high")
        if self.steps < 1:
            raise ValueError(f"clip_schedule.steps={self.steps} must be at least 1")


def check_clip_range(low: float, high: float, low_name: str = "clip_low", high_name: str = "clip_high") -> None:
    """Raise ValueError for clip distances that bound no ratio."""
    if not 0 <= low < 1 or high < 0:
        raise ValueError(f"{low_name}={low} must lie in [0, 1) and {high_name}={high} be at least 0")


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
    diagnostics = clip_fractions(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        diagnostics["clip_dual"] = (negative & (loss > bound)).float().detach()
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, diagnostics)


def clip_fractions(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> dict[str, torch.Tensor]:
    """Where the clip stops the gradient: below for negative, above for positive advantages, [R] of 0 and 1."""
    with torch.no_grad():
        return {
            "clip_low": ((advantages < 0) & (ratio < 1 - clip_low)).float(),
            "clip_high": ((advantages > 0) & (ratio > 1 + clip_high)).float(),
        }


class GRPO(Algorithm):
    """Group-relative advantages and a clipped surrogate.

    The paper writes std(r) without saying which: the sample deviation (n - 1) here, as in veRL and TRL, plus 1e-6 as in
    veRL (TRL adds 1e-4). `seq-mean-token-mean` is the paper's equation 3.

    Args:
        clip_low: lower clip distance; the ratio is bounded below by 1 - clip_low.
        clip_high: upper clip distance.
        dual_clip: bound on the loss of tokens with negative advantage, > 1; None = off.
        advantage: how rewards become advantages; None = divided by the group's standard deviation.
        aggregation: see `Algorithm`.
        max_tokens: see `Algorithm`.
        kl: penalty towards a reference model; None = off, no reference in memory.
        clip_schedule: moves the clip range during the run; None = fixed.
    """

    ignored: ClassVar[tuple[str, ...]] = ()
    """Options that a subclass does not read; setting one is an error."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage: GroupAdvantage | None = None,
        aggregation: AggregationKind = "seq-mean-token-mean",
        max_tokens: int | None = None,
        kl: KLPenalty | None = None,
        clip_schedule: ClipSchedule | None = None,
    ) -> None:
        super().__init__(aggregation, max_tokens, kl)
        check_clip_range(clip_low, clip_high)
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"dual_clip={dual_clip} must be greater than 1 (or null)")
        given = {"dual_clip": dual_clip, "advantage": advantage, "clip_schedule": clip_schedule}
        if useless := [name for name in self.ignored if given[name] is not None]:
            raise ValueError(f"{type(self).__name__} does not read {', '.join(useless)}: leave it out")
        self.clip_low = self._first_low = clip_low
        self.clip_high = self._first_high = clip_high
        self.dual_clip = dual_clip
        self.advantage = advantage or GroupAdvantage()
        self.clip_schedule = clip_schedule

    def begin_step(self, step: int) -> None:
        """See `Algorithm.begin_step`: place the clip range."""
        super().begin_step(step)
        if self.clip_schedule is not None:
            part = min(1.0, step / self.clip_schedule.steps)
            self.clip_low = self._first_low + part * (self.clip_schedule.low - self._first_low)
            self.clip_high = self._first_high + part * (self.clip_schedule.high - self._first_high)

    def scalars(self) -> dict[str, float]:
        """The step's clip range, where it moves."""
        return {} if self.clip_schedule is None else {"clip/low": self.clip_low, "clip/high": self.clip_high}

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See `GroupAdvantage`."""
        return self.advantage(rewards.total, rewards)

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """See `clipped_surrogate`."""
        return clipped_surrogate(
            batch.logprobs, batch.old_logprobs, batch.advantages, self.clip_low, self.clip_high, self.dual_clip
        )

    def state(self) -> dict[str, Any]:
        """See `Algorithm.state`."""
        return {**super().state(), **self.advantage.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm.load_state`."""
        super().load_state(state)
        self.advantage.load_state(state)
