"""Every algorithm against hand calculation or its paper's formula, gradients numerically in float64."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from test_policy_grpo import table, token_batch

from lightning_modules.algorithms.advantage import GroupAdvantage, whiten
from lightning_modules.algorithms.base import Counts
from lightning_modules.algorithms.cispo import CISPO
from lightning_modules.algorithms.dapo import DAPO
from lightning_modules.algorithms.dr_grpo import DrGRPO
from lightning_modules.algorithms.gdpo import GDPO
from lightning_modules.algorithms.grpo import GRPO, ClipSchedule
from lightning_modules.algorithms.gspo import GSPO, GSPOToken
from lightning_modules.algorithms.importance import ImportanceCorrection
from lightning_modules.algorithms.kl import KLPenalty, kl_estimate
from lightning_modules.algorithms.luffy import Luffy
from lightning_modules.algorithms.passk import PassK, passk_advantages
from lightning_modules.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from lightning_modules.algorithms.remax import ReMax
from lightning_modules.algorithms.rloo import RLOO
from lightning_modules.algorithms.sapo import SAPO
from rewards.terms import soft_overlong

ALL = [
    GRPO(),
    DAPO(),
    DrGRPO(10),
    GSPO(0.2, 0.2),
    GSPOToken(0.2, 0.2),
    CISPO(),
    SAPO(),
    ReinforcePP(),
    ReMax(),
    Luffy(),
]
RESPONSE = [0, 0, 0, 1, 1]
OLD = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.3], dtype=torch.float64)
NEW = OLD + torch.tensor([0.1, -0.3, 0.25, 0.4, -0.1], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.5, 1.5, 1.5, -0.7, -0.7], dtype=torch.float64)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def assert_close(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)
def test_on_policy_gradient_is_the_policy_gradient(algorithm):
    """At ratio 1 every algorithm's gradient is -A per token (GSPO: of the response's mean, weighted alike)."""
    logprobs = OLD.clone().requires_grad_()
    batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE)
    batch = type(batch)(**{**batch.__dict__, "logprobs": logprobs})
    algorithm.token_loss(batch).loss.sum().backward()
    assert_close(logprobs.grad, -ADVANTAGE)


@pytest.mark.parametrize(
    "algorithm", [a for a in ALL if not isinstance(a, GSPOToken | CISPO)], ids=lambda a: type(a).__name__
)
def test_gradients_are_numerically_right(algorithm):
    def loss(logprobs):
        batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE)
        return algorithm.token_loss(type(batch)(**{**batch.__dict__, "logprobs": logprobs})).loss

    assert torch.autograd.gradcheck(loss, (NEW.clone().requires_grad_(),))


def test_gspo_by_the_papers_equations():
    # Equation 7: s = (pi / pi_old)^(1 / |y|); equation 5: mean over responses of min(s A, clip(s) A).
    algorithm = GSPO(clip_low=0.05, clip_high=0.01)
    batch = token_batch(NEW, OLD, ADVANTAGE, RESPONSE)
    s = [math.exp((0.1 - 0.3 + 0.25) / 3), math.exp((0.4 - 0.1) / 2)]
    objective = (min(s[0] * 1.5, min(s[0], 1.01) * 1.5) + min(s[1] * -0.7, max(min(s[1], 1.01), 0.95) * -0.7)) / 2
    loss = (algorithm.token_loss(batch).loss * algorithm.token_weights(batch, Counts(5, 2))).sum()
    assert_close(loss, -objective)


def test_gspo_token_equals_gspo_for_equal_advantages_in_value_and_gradient():
    results = []
    for algorithm in (GSPO(0.2, 0.2), GSPOToken(0.2, 0.2)):
        logprobs = NEW.clone().requires_grad_()
        batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE)
        batch = type(batch)(**{**batch.__dict__, "logprobs": logprobs})
        loss = (algorithm.token_loss(batch).loss * algorithm.token_weights(batch, Counts(5, 2))).sum()
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    assert_close(results[1][0], results[0][0])
    assert_close(results[1][1], results[0][1])


def test_cispo_weights_are_clipped_and_carry_no_gradient():
    logprobs = NEW.clone().requires_grad_()
    batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE)
    batch = type(batch)(**{**batch.__dict__, "logprobs": logprobs})
    out = CISPO(clip_low=0.1, clip_high=0.2).token_loss(batch)
    weight = (NEW - OLD).exp().clamp(0.9, 1.2)
    assert_close(out.loss, -weight * ADVANTAGE * NEW)
    out.loss.sum().backward()
    assert_close(logprobs.grad, -weight * ADVANTAGE)
    assert out.diagnostics["clip_high"].tolist() == [0, 0, 1, 1, 0]
    assert out.diagnostics["clip_low"].tolist() == [0, 1, 0, 0, 0]


def test_sapo_by_the_papers_formula():
    out = SAPO(tau_positive=1.0, tau_negative=1.05).token_loss(token_batch(NEW, OLD, ADVANTAGE, RESPONSE))
    ratio = (NEW - OLD).exp()
    tau = f64(1, 1, 1, 1.05, 1.05)
    assert_close(out.loss, -(1 / (1 + (-tau * (ratio - 1)).exp())) * 4 / tau * ADVANTAGE)


def test_rloo_is_the_leave_one_out_difference():
    got = RLOO().advantages(table([1.0, 0.0, 0.5, 7.0], [0, 0, 0, 1]))
    assert_close(got, [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 0.0])


def test_remax_subtracts_the_greedy_reward():
    rewards = table([1.0, 0.0, 0.5], [0, 0, 1], greedy_total=f64(0.25, 1.0))
    assert_close(ReMax().advantages(rewards), [0.75, -0.25, -0.5])
    assert ReMax().needs.greedy_baseline
    with pytest.raises(ValueError, match="greedy"):
        ReMax().advantages(table([1.0], [0]))


def test_reinforce_pp_whitens_over_tokens():
    # Lengths 1 and 3: token mean (1*1 + 3*0) / 4 = 0.25, variance (0.75^2 + 3 * 0.25^2) / 4 = 0.1875.
    got = ReinforcePP().advantages(table([1.0, 0.0], [0, 1], lengths=torch.tensor([1, 3])))
    torch.testing.assert_close(got, f64(0.75, -0.25) / math.sqrt(0.1875), rtol=1e-5, atol=0)
    baseline = ReinforcePPBaseline().advantages(table([1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], lengths=torch.ones(4)))
    torch.testing.assert_close(baseline, f64(0.5, -0.5, 0, 0) / math.sqrt(0.125), rtol=1e-5, atol=0)


def test_gdpo_tells_apart_what_a_sum_confuses():
    parts = {"accuracy": f64(1, 0, 0), "format": f64(0, 1, 1)}
    rewards = table([1.0, 1.0, 1.0], [0, 0, 0], parts=parts)
    got = GDPO(weights={"accuracy": 1.0, "format": 1.0}, eps=0.0).advantages(rewards)
    assert got.abs().max() < 1e-9  # opposite parts with equal weights cancel; whitening must not amplify the rounding
    got = GDPO(weights={"accuracy": 2.0, "format": 1.0}, eps=0.0).advantages(rewards)
    # accuracy: mean 1/3, sample std 1/sqrt(3) -> 2/sqrt(3), -1/sqrt(3); whitened: divided by sqrt(mean square).
    normalised = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(got, normalised / math.sqrt(2.0), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"\['speed'\]"):
        GDPO(weights={"speed": 1.0}).advantages(table([1.0], [0], parts=parts))


def test_gdpo_part_that_a_task_does_not_have_adds_nothing():
    nan = math.nan
    parts = {"accuracy": f64(1, 0, 1, 0), "tiou": f64(nan, nan, 0.2, 0.8)}
    algorithm = GDPO(weights={"accuracy": 2.0, "tiou": 1.0}, eps=0.0)
    got = algorithm.advantages(table([0.0] * 4, [0, 0, 1, 1], parts=parts))
    # In units of 1/sqrt(2): 2, -2 for the first group, 2 - 1 and -2 + 1 for the second; mean square 10/4.
    torch.testing.assert_close(got, f64(2, -2, 1, -1) / math.sqrt(2.5), rtol=1e-5, atol=0)
    without = table([0.0] * 2, [0, 0], parts={"accuracy": f64(1, 0)})
    torch.testing.assert_close(algorithm.advantages(without), f64(1, -1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("wrong", "total", "k"), [(3, 5, 2), (4, 8, 4), (7, 8, 4), (1, 4, 3)])
def test_passk_equals_the_mean_over_all_subsets(wrong, total, k):
    right = [i >= wrong for i in range(total)]
    subsets = list(combinations(range(total), k))
    worth = [float(any(right[i] for i in s)) for s in subsets]
    mean = sum(worth) / len(worth)
    spread = math.sqrt(sum((w - mean) ** 2 for w in worth) / len(worth))
    got = passk_advantages(wrong, total, k)
    for index, advantage in ((total - 1, got[0]), (0, got[1])):
        member = [(w - mean) / spread if spread else 0.0 for s, w in zip(subsets, worth, strict=True) if index in s]
        assert advantage == pytest.approx(sum(member) / len(member), abs=1e-12)


def test_passk_per_group():
    rewards = table([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 0, 1, 1, 1])
    high, low = passk_advantages(2, 3, 2)
    assert_close(PassK(k=2).advantages(rewards), [high, low, low, 0, 0, 0])
    with pytest.raises(ValueError, match="k=4 needs"):
        PassK(k=4).advantages(rewards)


def test_luffy_shapes_offline_tokens_only():
    off = torch.tensor([True, True, True, False, False])
    out = Luffy(gamma=0.1).token_loss(token_batch(NEW, OLD, ADVANTAGE, RESPONSE, off_policy=off))
    p = NEW.exp()
    want = -p / (p + 0.1) * ADVANTAGE
    assert_close(out.loss[:3], want[:3])
    assert_close(out.loss[3:], GRPO().token_loss(token_batch(NEW, OLD, ADVANTAGE, RESPONSE)).loss[3:])


def test_dapo_overlong_by_hand():
    got = [soft_overlong(length, max_tokens=100, buffer=20) for length in (10, 80, 90, 100, 200)]
    assert got == pytest.approx([0, 0, -0.5, -1, -1])
    dapo = DAPO(overlong_max=100, overlong_buffer=20, advantage=GroupAdvantage(std="none"))
    rewards = table([1.0, 1.0], [0, 0], lengths=torch.tensor([10, 100]))
    assert_close(dapo.advantages(rewards), [0.5, -0.5])
    assert DAPO(overlong_max=20480).overlong_buffer == 4096, "the paper's share"
    assert dapo.aggregation == "token-mean"
    assert dapo.clip_high == 0.28


@pytest.mark.parametrize("n", [3, 6, 7])
@pytest.mark.parametrize("value", [0.1, 0.7, 0.95])
def test_equal_rewards_have_no_spread_at_all(value, n):
    """The rounded mean of n equal numbers may differ from them; such a group must still count as without signal."""
    rewards = table([value] * n + [1.0, 0.0], [0] * n + [1] * 2, correct=f64(*[value] * n, 1.0, 0.0))
    assert DAPO().keep_groups(rewards).tolist() == [False, True]
    for algorithm in (GRPO(), RLOO(), DrGRPO(10)):
        assert algorithm.advantages(rewards)[:n].tolist() == [0.0] * n


def test_dapo_keeps_groups_with_spread():
    rewards = table([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2])
    assert DAPO().keep_groups(rewards).tolist() == [False, True, False]
    # A reward that starts at an overlap of 0.7 sees no difference between 0.3 and 0.5: no advantage, no group.
    near_misses = table([0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], correct=f64(0.3, 0.5, 0.9, 0.5))
    assert DAPO().keep_groups(near_misses).tolist() == [False, True]
    assert DAPO().advantages(near_misses)[:2].tolist() == [0.0, 0.0]
    # Equal accuracies are what the paper filters, whatever else the reward holds.
    assert DAPO().keep_groups(table([0.1, 0.0], [0, 0], correct=f64(0.0, 0.0))).tolist() == [False]


def test_dr_grpo_has_no_spread_and_a_constant_divisor():
    algorithm = DrGRPO(max_tokens=10)
    assert_close(algorithm.advantages(table([1.0, 0.0], [0, 0])), [0.5, -0.5])
    batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE)
    assert_close(algorithm.token_weights(batch, Counts(5, 2)), [1 / 20] * 5)


def test_kl_estimators_by_hand():
    new, ref = f64(-1.0, -2.0), f64(-1.5, -1.0)
    assert_close(kl_estimate(new, ref, "k1"), [0.5, -1.0])
    assert_close(kl_estimate(new, ref, "k2"), [0.125, 0.5])
    assert_close(kl_estimate(new, ref, "abs"), [0.5, 1.0])
    assert_close(kl_estimate(new, ref, "k3"), [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0])
    for kind in ("k1", "k2", "k3", "abs"):
        assert torch.autograd.gradcheck(lambda x, k=kind: kl_estimate(x, ref, k), (new.clone().requires_grad_(),))
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(new, ref, "k4")


def test_adaptive_kl_by_hand():
    kl = KLPenalty(beta=1.0, target=0.1, horizon=100)
    kl.adapt(0.2, 10)  # error clipped to 0.2: 1 + 0.2 * 10 / 100
    assert kl.beta == pytest.approx(1.02)
    kl.adapt(0.095, 10)  # error -0.05
    assert kl.beta == pytest.approx(1.02 * 0.995)
    other = GRPO(kl=KLPenalty(beta=1.0, target=0.1))
    other.load_state(GRPO(kl=kl).state())
    assert other.kl.beta == kl.beta
    large = KLPenalty(beta=1.0, target=0.1, horizon=100)
    large.adapt(0.0, 10**6)  # more responses than the horizon: 20 %, never below zero
    assert large.beta == pytest.approx(0.8)
    large.adapt(math.nan, 10)
    assert large.beta == pytest.approx(0.8), "a step that is skipped leaves the weight alone"
    fixed = KLPenalty(beta=0.5)
    fixed.adapt(9.0, 10)
    assert fixed.beta == 0.5


def test_needs_follow_the_settings():
    assert not GRPO().needs.ref_logprobs
    assert GRPO(kl=KLPenalty()).needs.ref_logprobs
    assert not GRPO(kl=KLPenalty(beta=0.0)).needs.ref_logprobs
    assert GRPO(kl=KLPenalty(where="reward")).needs.old_logprobs


def test_options_that_would_do_nothing_are_refused():
    with pytest.raises(ValueError, match="CISPO does not read dual_clip"):
        CISPO(dual_clip=3.0)
    with pytest.raises(ValueError, match="SAPO does not read clip_high"):
        SAPO(clip_high=0.3)
    with pytest.raises(ValueError, match="overlong_buffer=4 needs overlong_max"):
        DAPO(overlong_buffer=4)
    with pytest.raises(ValueError, match=r"kl beta=0 stays 0 whatever target=0\.1"):
        KLPenalty(beta=0, target=0.1)
    with pytest.raises(ValueError, match="RLOO does not read advantage"):
        RLOO(advantage=GroupAdvantage(std="none"))
    for algorithm in (GDPO, PassK):
        with pytest.raises(ValueError, match=f"{algorithm.__name__} does not read: use where='loss'"):
            algorithm(kl=KLPenalty(where="reward"))


def test_fewest_responses_per_prompt():
    least = [a.min_responses for a in (GRPO(), ReMax(), ReinforcePP(), ReinforcePPBaseline(), PassK(k=4), PassK(k=1))]
    assert least == [2, 1, 1, 2, 4, 2]


def test_clip_schedule_by_hand():
    algorithm = GRPO(clip_high=0.2, clip_schedule=ClipSchedule(low=0.1, high=0.4, steps=100))
    algorithm.begin_step(50)
    assert (algorithm.clip_low, algorithm.clip_high) == pytest.approx((0.15, 0.3))
    algorithm.begin_step(500)
    assert (algorithm.clip_low, algorithm.clip_high) == pytest.approx((0.1, 0.4))


def test_task_spread_is_a_running_mean_of_moments():
    advantage = GroupAdvantage(std="task", decay=0.5, eps=0.0)
    first = table([1.0, 0.0], [0, 0], tasks=("a",))
    assert_close(advantage(first.total, first), [1.0, -1.0])  # mean 0.5, mean square 0.5: spread 0.5
    second = table([1.0, 1.0, 3.0, 1.0], [0, 0, 1, 1], tasks=("a", "b"))
    got = advantage(second.total, second)
    # Task a: moments (0.75, 0.75), spread sqrt(0.1875); task b starts at (2, 5), spread 1.
    assert_close(got, [0.0, 0.0, 1.0, -1.0])
    assert advantage.moments["a"] == pytest.approx((0.75, 0.75))
    other = GroupAdvantage(std="task")
    other.load_state(advantage.state())
    assert other.moments == advantage.moments


def test_a_step_without_numbers_does_not_stay_in_the_moments():
    advantage = GroupAdvantage(std="task", eps=0.0)
    for values in ([math.nan, 1.0], [1.0, 0.0]):
        rewards = table(values, [0, 0], tasks=("a",))
        got = advantage(rewards.total, rewards)
        assert got.isnan().all() == math.isnan(values[0])
    assert_close(got, [1.0, -1.0])
    rewards = table([math.inf, 1.0], [0, 0], tasks=("a",))
    advantage(rewards.total, rewards)
    assert advantage.moments["a"] == (0.5, 0.5)


def test_no_spread_without_epsilon_is_no_signal():
    rewards = table([0.7, 0.7, 1.0, 0.0], [0, 0, 1, 1])
    got = GroupAdvantage(eps=0.0)(rewards.total, rewards)
    assert_close(got, [0, 0, 0.5**0.5, -(0.5**0.5)])


def test_null_means_the_papers_advantage():
    for algorithm in (DrGRPO(10, advantage=None), Luffy(advantage=None)):
        assert algorithm.advantage.std == "none"


def test_whitening_of_nothing_and_of_equal_values():
    assert whiten(f64()).numel() == 0
    assert whiten(f64(2, 2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("settings", "weights", "outside"),
    [
        ({"level": "token", "mode": "truncate", "high": 1.2}, [1.1, 0.8, 1.2, 1.2, 0.9], [0, 0, 1, 1, 0]),
        ({"level": "token", "mode": "mask", "high": 1.2, "low": 0.85}, [1.1, 0, 0, 0, 0.9], [0, 1, 1, 1, 0]),
        ({"level": "sequence", "mode": "truncate", "high": 1.2}, [1.144] * 3 + [1.2] * 2, [0, 0, 0, 1, 1]),
        ({"level": "sequence", "mode": "mask", "high": 1.2}, [1.144] * 3 + [0] * 2, [0, 0, 0, 1, 1]),
        ({"level": "geometric", "mode": "mask", "high": 1.2}, [1.144 ** (1 / 3)] * 3 + [1.35**0.5] * 2, [0] * 5),
    ],
)
def test_importance_correction_by_hand(settings, weights, outside):
    ratio = f64(1.1, 0.8, 1.3, 1.5, 0.9)  # products: 1.144 and 1.35
    batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE, rollout_logprobs=OLD - ratio.log())
    got, out = ImportanceCorrection(**settings)(batch)
    assert_close(got, weights)
    assert out.tolist() == outside


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [1.3, 1.5, 0.9]), ("sequence", [1.3, 1.35, 1.35]), ("geometric", [1.3, 1.35**0.5, 1.35**0.5])],
)
def test_importance_correction_leaves_offline_tokens_alone(level, weights):
    """The first response begins with two tokens from elsewhere; one of them has no log-prob at all."""
    ratio = f64(7.0, math.nan, 1.3, 1.5, 0.9)
    offline = torch.tensor([True, True, False, False, False])
    batch = token_batch(OLD, OLD, ADVANTAGE, RESPONSE, rollout_logprobs=OLD - ratio.log(), off_policy=offline)
    got, outside = ImportanceCorrection(level=level, high=2.0)(batch)
    assert_close(got, [1.0, 1.0, *weights])
    assert outside.tolist() == [0] * 5
    masked, _ = ImportanceCorrection(level=level, mode="mask", high=1.2)(batch)
    assert masked[:2].tolist() == [1, 1], "also where the response's own tokens are dropped"


def test_gspo_token_differs_from_gspo_where_tokens_of_a_response_weigh_differently():
    gradients = []
    for algorithm in (GSPO(0.2, 0.2), GSPOToken(0.2, 0.2)):
        logprobs = OLD.clone().requires_grad_()
        weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5], dtype=OLD.dtype)  # as an importance correction gives
        (algorithm.token_loss(token_batch(logprobs, OLD, ADVANTAGE, RESPONSE)).loss * weights).sum().backward()
        gradients.append(logprobs.grad)
    assert not torch.allclose(*gradients)


def test_gspo_token_gives_every_token_its_responses_ratio_to_the_last_bit():
    """In float32, whatever the size of the log-probs: the clip range is narrow."""
    generator = torch.Generator().manual_seed(0)
    old = -30 * torch.rand(64, generator=generator)
    new = old + math.log(1.0004)
    batch = token_batch(new, old, -torch.ones(64), [0] * 64)  # where A < 0 the ratio is not bounded above
    batch = type(batch)(**{**batch.__dict__, **{n: getattr(batch, n).float() for n in ("logprobs", "old_logprobs")}})
    assert len(GSPOToken().token_loss(batch).loss.unique()) == 1


def test_every_algorithm_has_a_yaml_that_builds_and_every_key_is_explained_once():
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    from datamodules.common.places import CONF_DIR, option_files
    from lightning_modules.algorithms.base import Algorithm

    lines = [line for file in (CONF_DIR / "algorithm").glob("*.yaml") for line in file.read_text().splitlines()]
    explained = {line.partition(":")[0].strip() for line in lines if "  #" in line} | {"advantage", "kl", "_target_"}
    assert len(option_files("algorithm")) >= 16
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        for name in option_files("algorithm"):
            config = compose("train", overrides=[f"algorithm={name}"]).algorithm
            assert isinstance(instantiate(config, _convert_="all"), Algorithm), name
            assert set(config) <= explained, name
