"""What can be switched on: KL, entropy bonus, importance correction, mismatch gate."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from policy_helpers import load_processor, make_batch, prepared_sample
from test_policy_update import make_module, make_updater, weights

from datamodules.common.seeds import response_seed
from datamodules.types import StepBatch
from lightning_modules.algorithms.advantage import GroupAdvantage
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.importance import ImportanceCorrection
from lightning_modules.algorithms.kl import KLPenalty
from lightning_modules.algorithms.luffy import Luffy
from lightning_modules.core.metrics import MetricBag
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.update.collect import collect
from lightning_modules.update.mismatch import MismatchGate
from lightning_modules.update.optim import OptimizerSettings
from rewards.base import Score
from rollout.callback import assemble
from rollout.engines.hf import HFEngine
from rollout.types import GenerateRequest, SamplingSpec


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def sgd_update(tiny_model_dir, processor, algorithm, batch=None, **settings):
    module = make_module(tiny_model_dir, algorithm=algorithm, **settings)
    before = weights(module)
    module.update(
        batch or make_batch(processor, ("video", "text")), torch.optim.SGD(module.policy.parameters(), lr=0.1)
    )
    return module, {n: v - before[n] for n, v in weights(module).items()}


def test_kl_off_keeps_no_reference_and_kl_on_does(tiny_model_dir, processor):
    module, _ = sgd_update(tiny_model_dir, processor, GRPO())
    assert "reference" not in module._unregistered
    module, _ = sgd_update(tiny_model_dir, processor, GRPO(kl=KLPenalty(beta=0.1)))
    assert module.step_metrics["policy/kl_ref"] == pytest.approx(0.0, abs=1e-9)
    reference = module._unregistered["reference"]
    assert not any(p.requires_grad for p in reference.parameters())
    assert not any("reference" in name for name, _ in module.named_parameters())
    module.update(make_batch(processor, ("video",)), torch.optim.SGD(module.policy.parameters(), lr=0.0))
    assert module.step_metrics["policy/kl_ref"] > 1e-6, "the policy has moved, the reference has not"


def test_kl_in_the_loss_pulls_back_to_the_reference(tiny_model_dir, processor):
    module = make_module(tiny_model_dir, algorithm=GRPO(kl=KLPenalty(beta=1.0, kind="k2")))
    with torch.no_grad():
        for parameter in module.policy.hf.model.language_model.parameters():
            parameter.mul_(1.02)
    batch = make_batch(processor, ("text",), n=4)
    batch.scores[0] = tuple(Score(1.0, 1.0, 1.0) for _ in range(4))  # no advantage: only the penalty acts
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.002)
    divergence = []
    for _ in range(4):
        module.update(batch, optimizer)
        divergence.append(module.step_metrics["policy/kl_ref"])
    assert divergence[-1] < 0.9 * divergence[0]
    assert module.step_metrics["groups/zero_variance"] == 1.0


def test_kl_in_the_reward_lowers_rewards_before_advantages(tiny_model_dir, processor):
    kl = KLPenalty(beta=0.5, kind="k1", where="reward")
    module = make_module(tiny_model_dir, algorithm=GRPO(kl=kl, advantage=GroupAdvantage(std="none")))
    with torch.no_grad():
        module.policy.hf.lm_head.weight.mul_(1.1)
    batch = make_batch(processor, ("text",))
    updater = module.updater()
    data = collect(batch)
    old = updater.score(module.policy, data, data.keys)
    ref = updater.score(updater.reference, data, data.keys)
    cache = updater._cache(data, MetricBag(), old_needed=True)
    total = torch.tensor([s.total - 0.5 * float((old[0, i] - ref[0, i]).sum()) for i, s in enumerate(batch.scores[0])])
    for i, advantage in enumerate(total - total.mean()):
        assert float(cache.advantages[0, i]) == pytest.approx(float(advantage), abs=1e-5)


def test_entropy_bonus_raises_entropy(tiny_model_dir, processor):
    batch = make_batch(processor, ("text",))
    batch.scores[0] = tuple(Score(1.0, 1.0, 1.0) for _ in range(3))
    module = make_module(tiny_model_dir, entropy_bonus=1.0)
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.05)
    entropies = []
    for _ in range(3):
        module.update(batch, optimizer)
        entropies.append(module.step_metrics["policy/entropy"])
    assert entropies[0] < entropies[1] < entropies[2]


def test_importance_correction_scales_the_update(tiny_model_dir, processor):
    """An engine that reports half the probability gives ratio 2; truncation at 1.5 scales the gradient by 1.5."""
    batch = make_batch(processor, ("video", "text"))
    updater = make_updater(tiny_model_dir, processor)
    data = collect(batch)
    exact = updater.score(updater.policy, data, data.keys)
    for (g, r), logprobs in exact.items():
        response = batch.groups[g].responses[r]
        response.logprobs[:] = logprobs.numpy() - math.log(2.0)
    options = {"importance": ImportanceCorrection(mode="truncate", high=1.5)}
    module, scaled = sgd_update(tiny_model_dir, processor, GRPO(), batch, **options, optimizer=NO_CLIP)
    _, plain = sgd_update(tiny_model_dir, processor, GRPO(), batch, optimizer=NO_CLIP)
    name = "hf.lm_head.weight"
    torch.testing.assert_close(scaled[name], 1.5 * plain[name], rtol=1e-3, atol=1e-7)
    assert module.step_metrics["mismatch/importance"] == pytest.approx(1.5)
    assert module.step_metrics["mismatch/importance_outside"] == 1.0
    assert module.step_metrics["mismatch/max_diff_video"] == pytest.approx(math.log(2.0), abs=1e-4)


NO_CLIP = OptimizerSettings(clip_norm=None)


def test_mismatch_metrics_and_gate(tiny_model_dir, processor):
    batch = make_batch(processor, ("video", "text"))
    updater = make_updater(tiny_model_dir, processor)
    data = collect(batch)
    for (g, r), logprobs in updater.score(updater.policy, data, data.keys).items():
        batch.groups[g].responses[r].logprobs[:] = logprobs.numpy()
    module = make_module(tiny_model_dir, mismatch_gate=MismatchGate(max_kl=1e-3, max_diff=1e-2))
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.0)
    module.update(batch, optimizer)
    assert module.step_metrics["mismatch/max_diff"] < 1e-4
    assert module.step_metrics["mismatch/pearson"] == pytest.approx(1.0, abs=1e-6)
    batch.groups[0].responses[0].logprobs[:] -= 2.0  # a stale cache for videos
    with pytest.raises(RuntimeError, match=r"mismatch/kl_video=.*mismatch/max_diff_video=2"):
        module.update(batch, optimizer)


def test_gate_counts_violations_in_a_row():
    patient = MismatchGate(max_kl=0.1, patience=2)
    assert not patient.accepts({"mismatch/kl": 0.2})
    assert patient.accepts({"mismatch/kl": 0.0})
    assert not patient.accepts({"mismatch/kl": math.nan})
    assert patient.accepts({}), "nothing was compared"
    with pytest.raises(RuntimeError, match="disagree"):
        patient.accepts({"mismatch/kl_image": 0.2})


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "update_batch_size": 1}], ids=["one update", "four updates"])
def test_a_refused_batch_moves_nothing(tiny_model_dir, processor, settings):
    """The optimizer never steps on samples of an engine that disagrees; the engine is synchronised once more."""
    batch = make_batch(processor, ("video", "text"))  # random engine log-probs
    module = make_module(tiny_model_dir, mismatch_gate=MismatchGate(max_kl=0.05, patience=2), **settings)
    before = weights(module)
    optimizer = module.configure_optimizers()["optimizer"]
    module.update(batch, optimizer)
    assert module.step_metrics["train/skipped_mismatch"] == 1
    assert (module.rl_step, module.weights_version) == (1, 1)
    assert module.mismatch_gate.violations_in_a_row == module.rl_state()["mismatch_in_a_row"] == 1
    with pytest.raises(RuntimeError, match=r"mismatch/kl=.* > 0\.05.*nothing was trained"):
        module.update(batch, optimizer)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
    data = collect(batch)
    for (g, r), logprobs in module.updater().score(module.policy, data, data.keys).items():
        batch.groups[g].responses[r].logprobs[:] = logprobs.numpy()
    module.update(batch, optimizer)
    assert "train/skipped_mismatch" not in module.step_metrics
    assert module.mismatch_gate.violations_in_a_row == 0
    assert any(not torch.equal(value, before[name]) for name, value in weights(module).items())


def test_an_engine_with_other_weights_is_refused_until_it_is_synchronised(tiny_model_dir, processor):
    """A real engine whose vision tower is off by one sync: refused; the next sync mends it."""
    module = make_module(tiny_model_dir, mismatch_gate=MismatchGate(max_kl=1e-3, patience=2))
    engine = HFEngine(tiny_model_dir, Qwen3VLFamily())
    spec = SamplingSpec(n=3, max_tokens=6, banned_ids=module.banned_ids)
    prompts = [prepared_sample(processor, "gate:0", "video"), prepared_sample(processor, "gate:1", "text")]

    def rollout(step):
        requests = [
            GenerateRequest(f"{step}:{i}:{k}", prompt, spec, response_seed(0, step, prompt.uid, k))
            for i, prompt in enumerate(prompts)
            for k in range(spec.n)
        ]
        groups = sorted(assemble(prompts, requests, engine.generate(requests), spec.n), key=lambda g: g.index)
        scores = [tuple(Score(float(k == 0), 1.0, float(k == 0)) for k in range(spec.n)) for _ in groups]
        return StepBatch(prompts=prompts, rl_step=step, groups=groups, scores=scores)

    generator = torch.Generator().manual_seed(0)
    engine.update_weights(
        (n, p + 0.3 * torch.randn(p.shape, generator=generator) if "visual" in n else p)
        for n, p in module.engine_weights()
    )
    before = weights(module)
    optimizer = module.configure_optimizers()["optimizer"]
    module.update(rollout(0), optimizer)
    assert module.step_metrics["train/skipped_mismatch"] == 1
    assert module.step_metrics["mismatch/kl_video"] > 1e-3 > module.step_metrics["mismatch/kl_text"]
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
    assert module.weights_version == 1
    engine.update_weights(module.engine_weights())
    module.update(rollout(1), optimizer)
    assert module.step_metrics["mismatch/max_diff"] < 1e-4
    assert module.weights_version == 2


@pytest.mark.parametrize("offload", [False, True])
def test_reference_waits_on_the_host_and_gives_the_same_penalty(tiny_model_dir, processor, offload):
    module = make_module(tiny_model_dir, algorithm=GRPO(kl=KLPenalty(beta=0.1)), reference_offload=offload)
    moves = []
    reference = module.updater().reference
    move = reference.to
    reference.to = lambda device: moves.append(str(device)) or move(device)
    with torch.no_grad():
        module.policy.hf.lm_head.weight.mul_(1.1)
    module.update(make_batch(processor, ("video",)), module.configure_optimizers()["optimizer"])
    assert moves == (["cpu", "cpu"] if offload else []), "to the device of the pass and back"
    assert module.step_metrics["policy/kl_ref"] > 1e-6
    assert next(reference.parameters()).device.type == "cpu"


def test_offline_trajectories_reach_the_loss_but_not_the_mismatch(tiny_model_dir, processor):
    batch = make_batch(processor, ("video", "text"))
    group = batch.groups[0]
    lost = np.full_like(group.responses[2].logprobs, np.nan)
    trajectory = dataclasses.replace(group.responses[2], offline=True, logprobs=lost)
    batch.groups[0] = dataclasses.replace(group, responses=(*group.responses[:2], trajectory))
    options = {"importance": ImportanceCorrection()}
    module, moved = sgd_update(tiny_model_dir, processor, Luffy(), batch, **options)
    tokens = sum(len(r.token_ids) for g in batch.groups for r in g.responses)
    assert module.step_metrics["policy/off_policy"] == pytest.approx(len(lost) / tokens)
    assert all(math.isfinite(value) for value in module.step_metrics.values())
    assert moved["hf.lm_head.weight"].norm() > 0
    _, plain = sgd_update(
        tiny_model_dir, processor, GRPO(aggregation="token-mean"), make_batch(processor, ("video", "text"))
    )
    assert (moved["hf.lm_head.weight"] - plain["hf.lm_head.weight"]).norm() > 1e-4


@pytest.mark.parametrize("equal", [(0,), (0, 1)], ids=["one group", "all groups"])
def test_skipping_responses_without_advantage_changes_no_weight(tiny_model_dir, processor, equal):
    results = []
    for skip in (False, True):
        module = make_module(tiny_model_dir, skip_zero_advantage=skip)
        optimizer = module.configure_optimizers()["optimizer"]
        for seed in range(2):
            batch = make_batch(processor, ("video", "text"), seed=seed)
            for index in equal if seed else ():
                batch.scores[index] = tuple(Score(0.3, 1.0, 0.3) for _ in range(3))
            module.update(batch, optimizer)
        results.append((module.step_metrics["losses/policy"], weights(module)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-7)
    for (name, a), b in zip(results[0][1].items(), results[1][1].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, msg=name)
