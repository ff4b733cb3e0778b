"""Pass@k training (arXiv 2508.10751): reward groups of k answers, computed in closed form from n answers."""

from __future__ import annotations

from math import comb
from typing import Any

import torch

from lightning_modules.algorithms.base import RewardTable
from lightning_modules.algorithms.grpo import GRPO


def passk_advantages(wrong: int, total: int, k: int) -> tuple[float, float]:
    """(advantage of a right answer, of a wrong answer) with `wrong` wrong among `total`, equations 10 to 15.

    A k-subset is worth 1 when it holds a right answer. Its mean is m = 1 - C(wrong, k) / C(total, k), its spread
    s = sqrt(m (1 - m)); a right answer's subsets are always worth 1; a wrong answer's are worth 0 only if the other
    k - 1 are wrong too.
    """
    mean = 1 - comb(wrong, k) / comb(total, k)
    spread = (mean * (1 - mean)) ** 0.5
    if spread == 0:
        return 0.0, 0.0
    lost = comb(wrong - 1, k - 1) / comb(total - 1, k - 1)
    return (1 - mean) / spread, (1 - mean - lost) / spread


class PassK(GRPO):
    """Analytical pass@k advantages. (veRL's `grpo_passk` instead rewards only the best answer's lead over the second.)

    Args:
        k: answers per subset, at most the responses per prompt.
        threshold: accuracy from which an answer counts as right.
        **grpo: see `GRPO`.
    """

    ignored = ("advantage",)
    reads_total = False

    def __init__(self, k: int = 4, threshold: float = 0.5, **grpo: Any) -> None:
        super().__init__(**grpo)
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} must lie in (0, 1], else all answers or none count as right")
        self.k = k
        self.threshold = threshold

    @property
    def min_responses(self) -> int:
        """See `Algorithm.min_responses`."""
        return max(super().min_responses, self.k)

    def advantages(self, rewards: RewardTable) -> torch.Tensor:
        """See the class.

        Raises:
            ValueError: a group holds fewer than k responses.
        """
        values = rewards.correct if rewards.correct is not None else rewards.total
        right = values >= self.threshold
        result = torch.zeros_like(rewards.total)
        for index in range(rewards.num_groups):
            members = rewards.group == index
            size = int(members.sum())
            if size < self.k:
                raise ValueError(f"pass@k with k={self.k} needs at least k responses per prompt; a group has {size}")
            high, low = passk_advantages(int((~right[members]).sum()), size, self.k)
            result[members & right] = high
            result[members & ~right] = low
        return result
