"""Penalty on the divergence from a reference policy: estimators, where it acts, fixed or adaptive weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

KLKind = Literal["k1", "k2", "k3", "abs"]
KL_KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3", "abs")


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KLKind) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled.

    With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html): k1 = d (unbiased, high variance),
    k2 = d^2 / 2, k3 = exp(-d) - 1 + d (unbiased, non-negative; GRPO's), abs = |d|. veRL calls k2 mse;
    it also bounds k3 to [-10, 10], here only the exponential's argument is bounded. In the loss, on policy, the
    gradient of k1 is zero in expectation and that of k2 is the gradient of the divergence: k1 is for the reward.

    Args:
        logprobs: float [R].
        ref_logprobs: float [R].
        kind: estimator.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # The reference may find a token far likelier; the bound keeps the exponential from overflowing.
        return torch.expm1((-difference).clamp(max=20.0)) + difference.clamp(min=-20.0)
    if kind == "abs":
        return difference.abs()
    raise ValueError(f"kl kind={kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")


class KLPenalty:
    """How much and where divergence from the reference is punished.

    Args:
        beta: weight; with a target the starting weight.
        kind: estimator, see `kl_estimate`.
        where: `loss` adds beta * KL to every token's loss; `reward` subtracts beta * (sum of KL over the response)
            from its reward, with the policy before the step.
        target: mean KL per token that an adaptive weight aims at; None = fixed weight.
        horizon: responses over which an adaptive weight changes by at most 20 % (arXiv 1909.08593, section 2.2); a step
            of more responses than that changes it by 20 % too.
    """

    def __init__(
        self,
        beta: float = 0.001,
        kind: KLKind = "k3",
        where: Literal["loss", "reward"] = "loss",
        target: float | None = None,
        horizon: int = 10000,
    ) -> None:
        if beta < 0:
            raise ValueError(f"kl beta={beta} is negative")
        if kind not in KL_KINDS:
            raise ValueError(f"kl kind={kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")
        if where not in ("loss", "reward"):
            raise ValueError(f"kl where={where!r}: choose loss or reward")
        if target is not None and (target <= 0 or horizon <= 0):
            raise ValueError(f"adaptive kl needs target > 0 and horizon > 0; got target={target}, horizon={horizon}")
        if target is not None and beta == 0:
            raise ValueError(f"kl beta=0 stays 0 whatever target={target} asks for: start from a positive weight")
        self.beta = float(beta)
        self.kind: KLKind = kind
        self.where = where
        self.target = target
        self.horizon = horizon

    def __call__(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """Unweighted estimate per token, [R]."""
        return kl_estimate(logprobs, ref_logprobs, self.kind)

    def adapt(self, mean_kl: float, responses: float) -> None:
        """Move an adaptive weight after a step whose mean KL per token was `mean_kl`; not a number leaves it.

        Example: target 0.1, horizon 100, mean KL 0.2 over 10 responses: beta grows by 0.2 * 10 / 100 = 2 %.
        """
        if self.target is None or math.isnan(mean_kl):
            return
        error = min(max(mean_kl / self.target - 1.0, -0.2), 0.2)
        self.beta *= 1.0 + error * min(1.0, responses / self.horizon)

    def state(self) -> dict[str, float]:
        """The adaptive weight."""
        return {"kl_beta": self.beta} if self.target is not None else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        if self.target is not None and "kl_beta" in state:
            self.beta = float(state["kl_beta"])
