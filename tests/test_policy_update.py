"""The update on replayed rollouts: passes, counters, masks, non-finite steps, with and without a Trainer."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from policy_helpers import context, load_processor, make_batch

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.kl import KLPenalty
from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.layouts.patchify import PatchCache, Patchifier
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from lightning_modules.modules.rl import GRPOLightningModule
from lightning_modules.state.batch_dump import load_batch
from lightning_modules.update.collect import collect
from lightning_modules.update.optim import OptimizerSettings
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings
from rewards.base import Score


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def make_module(tiny_model_dir, algorithm=None, lr=1e-3, **settings):
    module = GRPOLightningModule(
        model_path=str(tiny_model_dir),
        family=Qwen3VLFamily(),
        algorithm=algorithm or GRPO(),
        layout=settings.pop("layout", SharedPrefixLayout()),
        optimizer=settings.pop("optimizer", OptimizerSettings(lr=lr)),
        **settings,
    )
    module.configure_model()
    return module


def make_updater(tiny_model_dir, processor, **settings):
    family = Qwen3VLFamily().open(str(tiny_model_dir))
    policy = PolicyModel(family.load(str(tiny_model_dir), torch.float32), family)
    return PolicyUpdater(policy, GRPO(), SharedPrefixLayout(), context(family, processor), UpdateSettings(**settings))


def weights(module):
    return {name: p.detach().clone() for name, p in module.policy.named_parameters()}


def test_an_update_moves_every_part_and_counts(tiny_model_dir, processor):
    module = make_module(tiny_model_dir)
    before = weights(module)
    optimizer = module.configure_optimizers()["optimizer"]
    module.update(make_batch(processor, ("video", "image")), optimizer)
    after = weights(module)
    moved = {module.family.part_of(n) for n in before if not torch.equal(before[n], after[n])}
    assert moved == {"vision_tower", "merger", "language_model"}
    assert (module.rl_step, module.weights_version) == (1, 1)
    metrics = module.step_metrics
    assert metrics["policy/ratio"] == 1.0
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0.0
    assert metrics["policy/first_ratio_error"] == 0.0
    assert metrics["groups/trained"] == 2
    assert metrics["train/grad_norm"] > 0
    assert metrics["reward/format"] == 1.0
    for name in ("mismatch/kl_video", "mismatch/pearson", "mismatch/max_diff_image", "policy/entropy", "lr/merger"):
        assert math.isfinite(metrics[name]), name


def test_the_loss_goes_down_on_a_repeated_batch(tiny_model_dir, processor):
    module = make_module(tiny_model_dir, lr=1e-3, epochs=8)
    batch = make_batch(processor, ("video",), n=4)
    best = max(range(4), key=lambda i: batch.scores[0][i].total)
    updater = module.updater()
    data = collect(batch)
    before = updater.score(module.policy, data, data.keys)[(0, best)].mean()
    module.update(batch, module.configure_optimizers()["optimizer"])
    after = updater.score(module.policy, data, data.keys)[(0, best)].mean()
    assert after > before + 0.05
    assert module.step_metrics["train/updates"] == 8


def test_masked_groups_shrink_the_normaliser(tiny_model_dir, processor):
    """A group without a verdict leaves the same update as a batch that never held it."""
    batch = make_batch(processor, ("text", "video", "image"))
    failed = Score(0.0, 0.0, 0.0, status="timeout", reason="judge")
    batch.scores[1] = (failed, *batch.scores[1][1:])
    module = make_module(tiny_model_dir)
    module.update(batch, torch.optim.SGD(module.policy.parameters(), lr=0.1))
    assert module.step_metrics["groups/masked"] == 1
    other = make_module(tiny_model_dir)
    smaller = make_batch(processor, ("text", "video", "image"))
    del smaller.groups[1], smaller.scores[1], smaller.prompts[1]
    smaller.scores[:] = [batch.scores[0], batch.scores[2]]
    other.update(smaller, torch.optim.SGD(other.policy.parameters(), lr=0.1))
    for (name, a), b in zip(weights(module).items(), weights(other).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


def test_a_batch_with_nothing_left_is_skipped_and_counted(tiny_model_dir, processor):
    module = make_module(tiny_model_dir)
    before = weights(module)
    batch = make_batch(processor, ("text",))
    batch.scores[0] = tuple(Score(0.0, 0.0, 0.0, status="error") for _ in range(3))
    module.update(batch, module.configure_optimizers()["optimizer"])
    batch.groups, batch.scores = [], []
    module.update(batch, module.configure_optimizers()["optimizer"])
    assert all(torch.equal(v, before[n]) for n, v in weights(module).items())
    assert (module.rl_step, module.weights_version, module.skipped_empty) == (2, 0, 2)


@pytest.mark.parametrize("budgets", [(10**6, 1), (1, 10**6), (10**6, 120)])
def test_old_logprob_pass_equals_the_first_forward_across_micro_batch_splits(tiny_model_dir, processor, budgets):
    """Ratio 1 and clip fraction 0 although the old pass and the update cut the work differently."""
    updater = make_updater(tiny_model_dir, processor, micro_batch_tokens=budgets[0])
    batch = make_batch(processor)
    data = collect(batch)
    old = updater.score(updater.policy, data, data.keys)
    other = PolicyUpdater(
        updater.policy,
        GRPO(clip_low=1e-4, clip_high=1e-4),
        PaddedLayout(),
        updater.context,
        UpdateSettings(micro_batch_tokens=budgets[1], epochs=2),
    )
    new = other.score(other.policy, data, data.keys)
    assert set(old) == set(new) == set(data.keys)
    assert max(float((old[k] - new[k]).abs().max()) for k in old) < 1e-5
    other.score = lambda *args: old
    _, bag = other.run(batch, torch.optim.SGD(other.policy.parameters(), lr=0.0))
    metrics = bag.reduce()
    assert metrics["policy/first_ratio_error"] < 1e-5
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0.0


def test_several_updates_per_batch_compute_old_logprobs_once(tiny_model_dir, processor):
    updater = make_updater(tiny_model_dir, processor, update_batch_size=2, epochs=2)
    calls = []
    score = updater.score
    updater.score = lambda *args: calls.append(1) or score(*args)
    updates, bag = updater.run(make_batch(processor), torch.optim.SGD(updater.policy.parameters(), lr=0.5))
    assert updates == 4
    assert len(calls) == 1
    metrics = bag.reduce()
    assert metrics["policy/ratio_max"] > 1.0001
    assert metrics["policy/first_ratio_error"] < 1e-5


def test_losses_are_means_over_the_updates_of_a_step(tiny_model_dir, processor):
    """Three passes that do not move the policy have the loss of one."""
    losses = []
    for epochs in (1, 3):
        updater = make_updater(tiny_model_dir, processor, epochs=epochs)
        _, bag = updater.run(make_batch(processor, ("text",)), torch.optim.SGD(updater.policy.parameters(), lr=0.0))
        losses.append(bag.reduce()["losses/policy"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)


def test_the_learning_rate_logged_is_the_one_used(tiny_model_dir, processor):
    module = make_module(tiny_model_dir, optimizer=OptimizerSettings(lr=0.4, warmup_steps=4))
    chosen = module.configure_optimizers()
    rates = []
    for _ in range(2):
        module.update(make_batch(processor, ("text",)), chosen["optimizer"], chosen["lr_scheduler"]["scheduler"])
        rates.append(module.step_metrics["lr/language_model"])
    assert rates == pytest.approx([0.1, 0.2])


def test_on_policy_update_runs_no_extra_pass(tiny_model_dir, processor):
    updater = make_updater(tiny_model_dir, processor)
    forwards = []
    updater.policy.register_forward_hook(lambda *_: forwards.append(1))
    updater.run(make_batch(processor), torch.optim.SGD(updater.policy.parameters(), lr=0.1))
    assert len(forwards) == 1


@pytest.mark.parametrize(("cache_mb", "per_video"), [(1024, 1), (0, 5)])
def test_further_passes_use_the_patches_again(tiny_model_dir, processor, cache_mb, per_video):
    """Four epochs over one batch: a pass for old log-probs and four updates."""
    updater = make_updater(tiny_model_dir, processor, epochs=4, patch_cache_mb=cache_mb)
    made, patchify = [], updater.patches.patchify
    updater.patches.patchify = lambda sample: made.append(sample.uid) or patchify(sample)
    recorded = make_batch(processor, ("video", "image"))
    updater.run(recorded, torch.optim.SGD(updater.policy.parameters(), lr=0.0))
    assert sorted(made) == sorted([p.uid for p in recorded.prompts] * per_video)
    assert updater.patches.used == 0, "nothing stays behind"


def test_patches_beyond_the_bound_are_made_anew(processor):
    samples = make_batch(processor, ("video", "image", "text")).prompts
    patchify = Patchifier(processor)
    plain = [patchify(sample) for sample in samples]
    assert [p.num_bytes for p in plain] == [2 * 16 * 1536 * 4, 4 * 2 * 1536 * 4, 0], "patches of 16 x 16 x 2 x 3 floats"
    cache = PatchCache(patchify, max_bytes=plain[0].num_bytes)
    first = cache(samples[0])
    assert cache(samples[0]) is not first, "kept only where a further pass was announced"
    cache.begin(keep=True)
    first, second = cache(samples[0]), cache(samples[1])
    assert cache(samples[0]) is first
    assert cache(samples[1]) is not second
    assert torch.equal(cache(samples[1]).images, plain[1].images)
    assert cache.used == plain[0].num_bytes


def test_nonfinite_step_is_skipped_dumped_and_stops_the_run(tiny_model_dir, processor, tmp_path):
    module = make_module(tiny_model_dir, dump_dir=str(tmp_path / "bad"), max_bad_updates=2)
    batch = make_batch(processor, ("video",))
    optimizer = module.configure_optimizers()["optimizer"]
    with torch.no_grad():
        module.policy.hf.lm_head.weight[5, 5] = torch.nan
    before = weights(module)
    module.update(batch, optimizer)
    assert module.skipped_nonfinite == 1
    assert module.weights_version == 0
    assert all(torch.equal(v, before[n]) for n, v in weights(module).items() if "lm_head" not in n)
    with pytest.raises(RuntimeError, match=r"2 updates in a row, the last in step 1.*step000001_rank0\.batch"):
        module.update(batch, optimizer)
    replayed = load_batch(tmp_path / "bad" / "step000000_rank0.batch")
    fresh = make_module(tiny_model_dir)
    fresh.update(replayed, fresh.configure_optimizers()["optimizer"])
    direct = make_module(tiny_model_dir)
    direct.update(batch, direct.configure_optimizers()["optimizer"])
    assert fresh.step_metrics == direct.step_metrics


def test_a_step_without_a_number_leaves_an_adaptive_kl_weight_alone(tiny_model_dir, processor):
    kl = KLPenalty(beta=0.1, target=0.1, horizon=6)
    module = make_module(tiny_model_dir, algorithm=GRPO(kl=kl))
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=0.0)
    good = module.policy.hf.lm_head.weight[50, 5].detach().clone()
    betas = []
    for value in (torch.nan, good):
        with torch.no_grad():
            module.policy.hf.lm_head.weight[50, 5] = value
        module.update(make_batch(processor, ("text",)), optimizer)
        betas.append(module.step_metrics["policy/kl_beta"])
    # Then KL 0 over 3 responses: error -0.2 * 3 / 6.
    assert betas == pytest.approx([0.1, 0.09])


def test_frozen_parts_stay_and_own_learning_rates_apply(tiny_model_dir, processor):
    settings = OptimizerSettings(lr=1e-3, part_lr={"merger": 0.0})
    module = make_module(tiny_model_dir, optimizer=settings, frozen_parts=["vision_tower"])
    before = weights(module)
    optimizer = module.configure_optimizers()["optimizer"]
    assert {g["part"]: g["lr"] for g in optimizer.param_groups} == {"merger": 0.0, "language_model": 1e-3}
    module.update(make_batch(processor, ("video", "text")), optimizer)
    moved = {module.family.part_of(n) for n, v in weights(module).items() if not torch.equal(before[n], v)}
    assert moved == {"language_model"}
    with pytest.raises(ValueError, match=r"frozen|freeze"):
        make_module(tiny_model_dir, frozen_parts=["eyes"])


def test_engine_weights_carry_checkpoint_names(tiny_model_dir):
    from safetensors.torch import load_file

    module = make_module(tiny_model_dir)
    saved = load_file(tiny_model_dir / "model.safetensors")
    streamed = dict(module.engine_weights())
    assert set(streamed) == set(saved)
    assert all(torch.equal(streamed[name], saved[name]) for name in saved)


def test_state_round_trip(tiny_model_dir, processor):
    module = make_module(tiny_model_dir)
    module.update(make_batch(processor, ("text",)), module.configure_optimizers()["optimizer"])
    other = make_module(tiny_model_dir)
    other.load_rl_state(module.rl_state())
    assert other.rl_state() == module.rl_state()
    assert other.rl_step == 1


def test_trainer_runs_the_module(tiny_model_dir, processor, tmp_path):
    module = make_module(tiny_model_dir)
    before = weights(module)
    batches = [make_batch(processor, ("video",), seed=i) for i in range(2)]
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=lambda b: b))
    assert module.rl_step == 2
    assert trainer.global_step == 2
    plain = make_module(tiny_model_dir)
    optimizer = plain.configure_optimizers()["optimizer"]
    for batch in batches:
        plain.update(batch, optimizer)
    for (name, a), b in zip(weights(module).items(), weights(plain).values(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(before[n], v) for n, v in weights(module).items())


def test_scores_that_do_not_fit_are_refused(tiny_model_dir, processor):
    module = make_module(tiny_model_dir)
    batch = make_batch(processor, ("text",))
    batch.scores[0] = batch.scores[0][:2]
    with pytest.raises(ValueError, match="3 responses but 2 scores"):
        module.update(batch, module.configure_optimizers()["optimizer"])
