"""What a policy-gradient algorithm is: advantages from scores, and a loss per token from log-probabilities.

The trainer never asks for a name. It reads `needs`, calls `advantages` once per step and `token_loss` once per
micro-batch, and weights the tokens by `aggregation` over the *global* batch, so that neither micro-batches nor ranks
nor layouts change the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from lightning_modules.algorithms.kl import KLPenalty

AggregationKind = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[AggregationKind, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Needs:
    """Passes an algorithm cannot do without; everything else is skipped."""

    old_logprobs: bool = False
    """Log-probs of the policy before the step, even when a single on-policy update would make them redundant."""
    ref_logprobs: bool = False
    """Log-probs of a frozen reference model."""
    greedy_baseline: bool = False
    """One greedy response per prompt, scored like the others."""


@dataclass(frozen=True)
class RewardTable:
    """Scores of this rank's responses that have a verdict, flat.

    Example: two prompts with two responses each have `group == tensor([0, 0, 1, 1])`.
    """

    total: torch.Tensor
    """float64 [N] reward that training maximises (double: whitening amplifies rounding of equal rewards)."""
    group: torch.Tensor
    """int64 [N] which prompt each response answers, ascending, 0-based without gaps."""
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Named reward components, float [N] each (accuracy, format, ...); NaN where a response's task has no such part."""
    correct: torch.Tensor | None = None
    """float [N] accuracy in [0, 1]."""
    lengths: torch.Tensor | None = None
    """int64 [N] response tokens."""
    greedy_total: torch.Tensor | None = None
    """float [groups] reward of the greedy response, where the algorithm needs it."""
    tasks: tuple[str, ...] = ()
    """Task name of each group."""

    @property
    def num_groups(self) -> int:
        """Number of prompts."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    def group_size(self) -> torch.Tensor:
        """float [N]: number of responses in each response's group."""
        counts = torch.bincount(self.group, minlength=self.num_groups)
        return counts[self.group].to(self.total.dtype)


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch's response tokens, R in all, of S responses."""

    logprobs: torch.Tensor
    """float [R] current policy; carries the gradient."""
    old_logprobs: torch.Tensor
    """float [R] policy before the step (equal to `logprobs`, detached, in a single on-policy update)."""
    advantages: torch.Tensor
    """float [R], constant within a response unless the algorithm made them per token."""
    response: torch.Tensor
    """int64 [R] which response each token belongs to, 0-based without gaps."""
    lengths: torch.Tensor
    """int64 [S] tokens of each response."""
    ref_logprobs: torch.Tensor | None = None
    """float [R] reference policy."""
    rollout_logprobs: torch.Tensor | None = None
    """float [R] what the engine reported."""
    entropy: torch.Tensor | None = None
    """float [R]."""
    off_policy: torch.Tensor | None = None
    """bool [R]: token of an offline trajectory."""

    def response_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` [R] over each response, [S]."""
        sums = values.new_zeros(len(self.lengths)).index_add(0, self.response, values)
        return sums / self.lengths.to(values.dtype)


@dataclass(frozen=True)
class Counts:
    """Size of the global batch of one update; what makes losses independent of how work was divided."""

    tokens: float
    """Response tokens over all ranks."""
    responses: float
    """Responses over all ranks."""


@dataclass(frozen=True)
class TokenLoss:
    """Result of an algorithm on one micro-batch."""

    loss: torch.Tensor
    """float [R] loss of each token, not yet averaged."""
    diagnostics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached float [R] quantities whose token mean is logged (clip fractions, ...)."""


@dataclass(frozen=True)
class DynamicSampling:
    """Keep generating until enough groups carry signal (DAPO, arXiv 2503.14476, section 3.2)."""

    target_groups: int | None = None
    """Groups of a step over all ranks; None = the prompts of one rollout batch."""
    max_rounds: int = 10
    """Batches generated for one step; then it is made with what is there, and with nothing at all the run stops."""

    def __post_init__(self) -> None:
        for value in (self.max_rounds, *([] if self.target_groups is None else [self.target_groups])):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"dynamic sampling needs whole numbers of at least 1, got {self}")


class Algorithm(ABC):
    """Base of all algorithms.

    Args:
        aggregation: `token-mean`: every token of the global batch counts the same (DAPO's and CISPO's equations take
            this mean within each prompt's group; over the batch as in veRL and TRL); `seq-mean-token-mean` (GRPO):
            every response counts the same; `seq-mean-token-sum-norm` (Dr.GRPO): token sums divided by the constant
            `max_tokens`, averaged over responses.
        max_tokens: the constant of `seq-mean-token-sum-norm`.
        kl: penalty towards a reference model; None = off.
    """

    base_needs = Needs()
    """What the algorithm needs by itself; `needs` adds what its KL penalty does."""
    group_based = True
    """Whether advantages compare the responses of one prompt, so that a single response carries no signal."""
    reads_total = True
    """Whether advantages come from the total reward; a KL penalty in the reward acts on nothing else."""
    reads_rewards = True
    """Whether advantages depend on rewards at all; without that, the policy's own samples teach it nothing."""
    dynamic_sampling: DynamicSampling | None = None
    """Set by algorithms that discard groups without signal and generate until the batch is full."""

    def __init__(
        self,
        aggregation: AggregationKind = "token-mean",
        max_tokens: int | None = None,
        kl: KLPenalty | None = None,
    ) -> None:
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
        if aggregation == "seq-mean-token-sum-norm" and (max_tokens is None or max_tokens <= 0):
            raise ValueError(
                f"aggregation='seq-mean-token-sum-norm' divides by max_tokens={max_tokens}: give a number above 0 "
                "(+algorithm.max_tokens=...)"
            )
        self.aggregation = aggregation
        self.max_tokens = max_tokens
        self.kl = kl if kl is not None and (kl.beta > 0 or kl.target is not None) else None
        if self.kl is not None and self.kl.where == "reward" and not self.reads_total:
            raise ValueError(
                f"kl where='reward' changes the total reward, which {type(self).__name__} does not read: "
                "use where='loss'"
            )

    @property
    def needs(self) -> Needs:
        """Passes this configuration cannot do without."""
        if self.kl is None:
            return self.base_needs
        old = self.base_needs.old_logprobs or self.kl.where == "reward"
        return replace(self.base_needs, ref_logprobs=True, old_logprobs=old)

    @property
    def min_responses(self) -> int:
        """Fewest responses per prompt that this configuration can learn from."""
        return 2 if self.group_based else 1

    def begin_step(self, step: int) -> None:  # noqa: B027 - most algorithms have nothing to do here
        """Called before every RL step with its number; schedules override it."""

    def scalars(self) -> dict[str, float]:
        """What a schedule made of the step's settings, for the log; the same on every rank."""
        return {}

    def keep_groups(self, rewards: RewardTable) -> torch.Tensor:
        """Bool [groups]: which groups are worth training on; only asked with `dynamic_sampling`."""
        return torch.ones(rewards.num_groups, dtype=torch.bool)

    @abstractmethod
    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """Advantage of each response, float [N]."""

    @abstractmethod
    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """Loss of each token (before averaging) and diagnostics."""

    def token_weights(self, batch: TokenBatch, counts: Counts) -> torch.Tensor:
        """float [R]: what each token's loss is multiplied with, so that the sum over all ranks is the mean wanted."""
        ones = torch.ones_like(batch.advantages)
        if self.aggregation == "token-mean":
            return ones / max(counts.tokens, 1.0)
        if self.aggregation == "seq-mean-token-mean":
            return ones / (batch.lengths.to(ones.dtype)[batch.response] * max(counts.responses, 1.0))
        return ones / (float(self.max_tokens or 1) * max(counts.responses, 1.0))

    def state(self) -> dict[str, Any]:
        """What the algorithm carries from step to step, JSON-able, for a resume."""
        return self.kl.state() if self.kl is not None else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        if self.kl is not None:
            self.kl.load_state(state)

    def check_rewards(self, rewards: RewardTable, uids: Sequence[str]) -> None:
        """Raise ValueError when a group holds fewer responses than the algorithm compares.

        Args:
            rewards: this rank's scores.
            uids: sample id of each group.
        """
        sizes = [int((rewards.group == index).sum()) for index in range(rewards.num_groups)]
        small = [(uid, size) for uid, size in zip(uids, sizes, strict=True) if size < self.min_responses]
        if small:
            uid, size = small[0]
            raise ValueError(
                f"sample {uid}: {type(self).__name__} compares the responses of one prompt and needs at least "
                f"{self.min_responses}, but this group holds {size} ({len(small)} of {len(sizes)} groups are too "
                "small): raise rollout.sampling.n, or choose an algorithm without groups"
            )
