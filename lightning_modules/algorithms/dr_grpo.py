"""Dr.GRPO (arXiv 2503.20783): no division by the group's spread, token sums over a constant instead of lengths."""

from __future__ import annotations

from typing import Any

from lightning_modules.algorithms.advantage import GroupAdvantage
from lightning_modules.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO without its two biases (towards short right and long wrong answers, and towards easy or hard prompts).

    As in the paper's code and TRL's `dr_grpo`, the mean over responses of token sums over the constant; veRL's
    `seq-mean-token-sum-norm` has been without the division by the number of responses.

    Args:
        max_tokens: the constant divisor, usually the longest response.
        **grpo: see `GRPO`; without `advantage` rewards are centred, not divided.
    """

    def __init__(self, max_tokens: int, **grpo: Any) -> None:
        grpo["advantage"] = grpo.get("advantage") or GroupAdvantage(std="none")
        super().__init__(max_tokens=max_tokens, **{"aggregation": "seq-mean-token-sum-norm", **grpo})
