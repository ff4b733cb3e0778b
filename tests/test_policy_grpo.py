"""GRPO's numbers by hand: advantages, clipped surrogate, aggregation; gradients numerically."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_modules.algorithms.advantage import GroupAdvantage
from lightning_modules.algorithms.base import Counts, DynamicSampling, RewardTable, TokenBatch
from lightning_modules.algorithms.grpo import GRPO, ClipSchedule, clipped_surrogate
from lightning_modules.algorithms.passk import PassK
from lightning_modules.algorithms.reinforce_pp import ReinforcePP
from lightning_modules.update.mismatch import MismatchGate


def table(totals, groups, **more):
    return RewardTable(torch.tensor(totals, dtype=torch.float64), torch.tensor(groups), **more)


def token_batch(logprobs, old, advantages, response, **more):
    response = torch.tensor(response)
    return TokenBatch(
        logprobs=torch.as_tensor(logprobs, dtype=torch.float64),
        old_logprobs=torch.as_tensor(old, dtype=torch.float64),
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        response=response,
        lengths=torch.bincount(response),
        **more,
    )


def test_advantages_by_hand():
    # Group 0: mean 0.5, sample std sqrt(((0.5)^2 * 2) / 1) = 0.7071. Group 1: equal rewards carry no signal.
    rewards = table([1.0, 0.0, 0.3, 0.3], [0, 0, 1, 1])
    want = torch.tensor([0.5, -0.5, 0, 0], dtype=torch.float64) / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(GRPO().advantages(rewards), want, rtol=1e-9, atol=0)
    plain = GroupAdvantage(std="none")
    assert plain(torch.tensor([1.0, 0.0, 2.0]), table([1.0, 0.0, 2.0], [0, 0, 0])).tolist() == [0.0, -1.0, 1.0]


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0], dtype=torch.float64)
    out = clipped_surrogate(ratio.log(), torch.zeros(5, dtype=torch.float64), advantage, 0.2, 0.28)
    # -min(r A, clip(r) A): 1.28*2; 1.5*2 unclipped for A < 0; 0.5*2; 0.8*2; 3.
    torch.testing.assert_close(out.loss, torch.tensor([-2.56, 3.0, -1.0, 1.6, -3.0], dtype=torch.float64))
    assert out.diagnostics["clip_high"].tolist() == [1, 0, 0, 0, 0]
    assert out.diagnostics["clip_low"].tolist() == [0, 0, 0, 1, 0]


def test_dual_clip_bounds_negative_advantages():
    ratio = torch.tensor([10.0, 10.0], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    out = clipped_surrogate(ratio.log(), torch.zeros(2, dtype=torch.float64), advantage, 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(out.loss, torch.tensor([3.0, -1.2], dtype=torch.float64))
    assert out.diagnostics["clip_dual"].tolist() == [1, 0]


def test_gradient_is_numerically_right():
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    new = (old + torch.tensor([0.05, -0.1, 0.6, -0.7], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, old, advantage, 0.2, 0.28, 3.0).loss, (new,))
    # On policy the gradient of the loss is -A: the policy gradient.
    same = old.clone().requires_grad_()
    clipped_surrogate(same, old, advantage, 0.2, 0.2).loss.sum().backward()
    torch.testing.assert_close(same.grad, -advantage)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token-mean", [1 / 8] * 4),
        ("seq-mean-token-mean", [1 / 5, 1 / (3 * 5), 1 / (3 * 5), 1 / (3 * 5)]),
        ("seq-mean-token-sum-norm", [1 / (10 * 5)] * 4),
    ],
)
def test_weights_by_hand(aggregation, weights):
    # A response of 1 token and one of 3; the global batch has 8 tokens in 5 responses.
    algorithm = GRPO(aggregation=aggregation, max_tokens=10)
    batch = token_batch([0.0] * 4, [0.0] * 4, [1.0] * 4, [0, 1, 1, 1])
    got = algorithm.token_weights(batch, Counts(tokens=8, responses=5))
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float64))


def test_bad_settings_are_said_with_their_values():
    with pytest.raises(ValueError, match=r"aggregation='mean'.*token-mean"):
        GRPO(aggregation="mean")
    for wrong in (None, 0, -5):  # a negative divisor would turn the loss round
        with pytest.raises(ValueError, match=f"divides by max_tokens={wrong}"):
            GRPO(aggregation="seq-mean-token-sum-norm", max_tokens=wrong)
    with pytest.raises(ValueError, match=r"clip_low=1\.5"):
        GRPO(clip_low=1.5)
    with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
        GRPO(dual_clip=0.5)
    with pytest.raises(ValueError, match=r"eps=-1"):
        GroupAdvantage(eps=-1)
    for schedule in ({"low": 1.5}, {"high": -1}, {"steps": 0}):
        with pytest.raises(ValueError, match=r"clip_schedule\.{}={}".format(*next(iter(schedule.items())))):
            ClipSchedule(**{"low": 0.2, "high": 0.3, "steps": 10, **schedule})
    for threshold in (0, 2):
        with pytest.raises(ValueError, match=f"threshold={threshold}"):
            PassK(threshold=threshold)
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match=f"target_groups={wrong}"):
            DynamicSampling(target_groups=wrong)
    for bound in ("max_kl", "max_diff"):
        with pytest.raises(ValueError, match=f"{bound}=-1 would refuse every step"):
            MismatchGate(**{bound: -1})


def test_groups_too_small_to_compare_are_refused_with_their_sample():
    with pytest.raises(ValueError, match=r"sample a: GRPO .* at least 2, but this group holds 1 \(2 of 2 groups"):
        GRPO().check_rewards(table([1.0, 0.0], [0, 1]), ["a", "b"])
    with pytest.raises(ValueError, match=r"sample b: .* holds 1 \(1 of 2 groups"):
        GRPO().check_rewards(table([1.0, 0.0, 1.0], [0, 0, 1]), ["a", "b"])
    with pytest.raises(ValueError, match=r"sample a: PassK .* at least 4, but this group holds 3"):
        PassK(k=4).check_rewards(table([1.0, 0.0, 1.0], [0, 0, 0]), ["a"])
    GRPO().check_rewards(table([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]), ["a", "b"])
    GRPO().check_rewards(table([], []), [])
    ReinforcePP().check_rewards(table([1.0], [0]), ["a"])
