"""DAPO (arXiv 2503.14476): clip-higher, token-level mean, dynamic sampling, soft overlong punishment."""

from __future__ import annotations

from typing import Any

import torch

from lightning_modules.algorithms.advantage import group_std
from lightning_modules.algorithms.base import DynamicSampling, RewardTable
from lightning_modules.algorithms.grpo import GRPO
from rewards.terms import soft_overlong


class DAPO(GRPO):
    """GRPO with DAPO's four changes. Equation 8 takes the token mean within a prompt's group; see `Algorithm`.

    Args:
        overlong_max: response length with the full punishment (the sampling limit); None = no punishment.
        overlong_buffer: tokens before it over which the punishment grows; None = a fifth of it (4096 of 20480 in the
            paper).
        overlong_weight: factor on the punishment.
        dynamic_sampling: discard groups whose rewards are all equal and refill the batch; None = off.
        **grpo: see `GRPO`; the defaults are DAPO's.
    """

    def __init__(
        self,
        overlong_max: int | None = None,
        overlong_buffer: int | None = None,
        overlong_weight: float = 1.0,
        dynamic_sampling: DynamicSampling | None = None,
        **grpo: Any,
    ) -> None:
        super().__init__(**{"clip_high": 0.28, "aggregation": "token-mean", **grpo})
        if overlong_max is None and overlong_buffer is not None:
            raise ValueError(f"overlong_buffer={overlong_buffer} needs overlong_max, the length with full punishment")
        if overlong_weight < 0:
            raise ValueError(f"overlong_weight={overlong_weight} would reward long responses: use 0 or more")
        self.overlong_max = overlong_max
        self.overlong_buffer = max(1, (overlong_max or 0) // 5) if overlong_buffer is None else overlong_buffer
        if overlong_max is not None and not 0 < self.overlong_buffer <= overlong_max:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} must be positive and at most overlong_max={overlong_max}"
            )
        self.overlong_weight = overlong_weight
        self.dynamic_sampling = dynamic_sampling

    def keep_groups(self, rewards: RewardTable) -> torch.Tensor:
        """Groups whose accuracies differ (equation 11 asks for 0 < correct < n; graded rewards: any spread).

        Where training maximises something else than the accuracy, that must differ, too: else no advantage is left.
        """
        signal = group_std(rewards.total, rewards.group) > 0
        if rewards.correct is not None:
            signal &= group_std(rewards.correct, rewards.group) > 0
        keep = torch.zeros(rewards.num_groups, dtype=torch.bool)
        keep[rewards.group] = signal
        return keep

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """Group advantages of the reward with the overlong punishment."""
        values = rewards.total
        if self.overlong_max is not None and rewards.lengths is not None:
            lengths = rewards.lengths.tolist()
            punishment = torch.tensor([soft_overlong(n, self.overlong_max, self.overlong_buffer) for n in lengths])
            values = values + self.overlong_weight * punishment.to(values)
        return self.advantage(values, rewards)
