"""Every paradigm in a real fit: real data module, vLLM engine, rewards, update. Switched off it changes no bit."""

from __future__ import annotations

import dataclasses

import lightning as L
import numpy as np
import pytest
import torch
from test_policy_update import make_module, weights
from test_rollout_callback import KeepOpen

from datamodules.demo.cold_start import build_cold_start_dataset
from datamodules.video_rl import VideoRLDataModule
from lightning_modules.algorithms.base import Algorithm, DynamicSampling
from lightning_modules.algorithms.dapo import DAPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.remax import ReMax
from lightning_modules.algorithms.weighting import AsOnPolicy, Shaped
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.offline.mix import MixCallback
from lightning_modules.offline.prefix import PrefixCallback
from lightning_modules.offline.replay import ReplayCallback
from lightning_modules.offline.schedule import Share
from lightning_modules.offline.sft_interleave import SFTInterleaveCallback
from rewards.callback import RewardCallback
from rewards.router import RewardRouter
from rewards.tasks.ocr import OCR
from rollout.callback import ColocatedEngineCallback
from rollout.table import table_rows

N, MAX_TOKENS = 3, 28


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    return build_cold_start_dataset(tmp_path_factory.mktemp("cold"), train_count=8, val_count=4)


class Watcher(L.Callback):
    """Keeps groups and metrics of every step."""

    def __init__(self) -> None:
        self.groups, self.metrics, self.step_metrics = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.groups.append(list(batch.groups))
        self.metrics.append(dict(batch.metrics))
        self.step_metrics.append(dict(pl_module.step_metrics))


def fit(tiny_model_dir, data_folder, engine, offline=None, steps=2, algorithm=None, **sampling):
    """Train a few steps; returns (watcher, weights, module)."""
    torch.manual_seed(0)
    data = VideoRLDataModule(
        str(tiny_model_dir),
        str(data_folder / "cold_train.jsonl"),
        family=Qwen3VLFamily(),
        media_root=str(data_folder),
        cache_dir=None,
        image_min_pixels=2048,
        video_min_pixels=2048,
        prompt_templates="tiny",
        rollout_batch_size=4,
        num_workers=0,
    )
    data.max_steps = steps
    module = make_module(tiny_model_dir, algorithm or GRPO(aggregation="token-mean"), lr=2e-3)
    spec = {"n": N, "max_tokens": MAX_TOKENS} | sampling
    rollout = ColocatedEngineCallback(lambda: KeepOpen(engine), spec, tiny_model_dir, Qwen3VLFamily(), seed=3)
    router = RewardRouter(routes={"ocr": OCR(metric="exact")}, style="direct")
    watcher = Watcher()
    callbacks = [rollout, RewardCallback(router), *([offline] if offline else []), watcher]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    return watcher, weights(module), module


def tokens(watcher):
    return [[r.token_ids.tolist() for g in groups for r in g.responses] for groups in watcher.groups]


def test_switched_off_nothing_changes_and_switched_on_it_does(
    vllm_engine, restore_engine_weights, tiny_model_dir, data_folder
):
    plain, before, _ = fit(tiny_model_dir, data_folder, vllm_engine)
    for offline in (
        MixCallback(enable=False, weighting=Shaped(), trajectory_files=["not looked for"]),
        PrefixCallback(enable=False, answers=N + 1),
        ReplayCallback(enable=False),
        SFTInterleaveCallback(enable=False),
    ):
        off, after, _ = fit(tiny_model_dir, data_folder, vllm_engine, offline)
        assert tokens(off) == tokens(plain)
        assert off.step_metrics == plain.step_metrics
        assert all(torch.equal(before[name], after[name]) for name in before)
    mixed, after, _ = fit(tiny_model_dir, data_folder, vllm_engine, MixCallback())
    assert not torch.equal(before["hf.lm_head.weight"], after["hf.lm_head.weight"])
    # The own answers of the first step are those of the plain run: same seeds, same policy.
    assert [t for k, t in enumerate(tokens(mixed)[0]) if k % N < N - 1] == [
        t for k, t in enumerate(tokens(plain)[0]) if k % N < N - 1
    ]


def test_mixing_logs_both_sources_apart(vllm_engine, restore_engine_weights, tiny_model_dir, data_folder):
    watcher, _, _ = fit(tiny_model_dir, data_folder, vllm_engine, MixCallback(weighting=Shaped()), steps=3)
    for groups, metrics, logged in zip(watcher.groups, watcher.metrics, watcher.step_metrics, strict=True):
        assert [[r.offline for r in g.responses] for g in groups] == [[False, False, True]] * 4
        assert metrics["offline/injected_count"] == 4
        assert logged["offline/response_share"] == pytest.approx(1 / 3)
        lengths = [len(g.responses[-1].token_ids) for g in groups]
        assert logged["offline/length"] == pytest.approx(np.mean(lengths))
        assert logged["offline/accuracy"] == 1.0
        # Own answers earn nothing: (1 - 1/3) / std and -1/3 / std with the sample deviation of (0, 0, 1).
        assert logged["offline/advantage"] == pytest.approx(2 / 3 / 3**-0.5, rel=1e-3)
        assert logged["online/advantage"] == pytest.approx(-1 / 3 / 3**-0.5, rel=1e-3)
        assert logged["mismatch/max_diff"] < 1e-4, "trajectories are no part of the engine's agreement"
    likelihood = [m["offline/logprob"] for m in watcher.step_metrics]
    assert likelihood[-1] > likelihood[0], "the policy moves towards the trajectories"


def test_mixing_leaves_the_greedy_baseline_and_one_own_answer(
    vllm_engine, restore_engine_weights, tiny_model_dir, data_folder
):
    """The smallest group, with ReMax, whose baseline is one more response of the engine."""
    watcher, _, _ = fit(tiny_model_dir, data_folder, vllm_engine, MixCallback(), steps=1, algorithm=ReMax(), n=2)
    assert [[r.offline for r in g.responses] for g in watcher.groups[0]] == [[False, True]] * 4
    assert all(g.greedy is not None for g in watcher.groups[0])
    # Neither the own nor the greedy answer of a random policy is right; each trajectory is one better than greedy.
    assert watcher.step_metrics[0]["online/advantage"] == pytest.approx(0.0)
    assert watcher.step_metrics[0]["offline/advantage"] == pytest.approx(1.0)


def test_a_prefix_is_continued_by_the_engine(vllm_engine, restore_engine_weights, tiny_model_dir, data_folder):
    offline = PrefixCallback(share=Share(0.5), answers=2, weighting=AsOnPolicy(weight=0.0))
    watcher, _, _ = fit(tiny_model_dir, data_folder, vllm_engine, offline, steps=2)
    for groups, logged in zip(watcher.groups, watcher.step_metrics, strict=True):
        for group in groups:
            whole = offline.reader.get(group.prompt).token_ids
            masks = [r.offline_mask for r in group.responses]
            assert not masks[0].any(), "the first answer is the policy's alone"
            for response, mask in zip(group.responses[1:], masks[1:], strict=True):
                length = int(mask.sum())
                assert 0 < length <= round(0.5 * len(whole))
                assert response.token_ids[:length].tolist() == whole[:length].tolist()
                assert mask[:length].all()
                assert len(response.token_ids) <= MAX_TOKENS
                assert response.text.startswith("<answer>")
                assert not response.offline
        # The engine's log-probs of the continuations are the trainer's behind prompt and prefix.
        assert logged["mismatch/max_diff"] < 1e-4
        marks = np.concatenate([r.offline_mask for group in groups for r in group.responses])
        assert logged["offline/token_share"] == pytest.approx(marks.mean())
        assert "prefixed/advantage" in logged
    assert watcher.metrics[0]["offline/prefixes_count"] == 8


def test_supervised_steps_follow_and_the_engine_learns_of_them(
    vllm_engine, restore_engine_weights, tiny_model_dir, data_folder
):
    offline = SFTInterleaveCallback(every=2, group_threshold=0.5)
    watcher, _, module = fit(tiny_model_dir, data_folder, vllm_engine, offline, steps=4)
    assert ["sft/nll" in m for m in watcher.step_metrics] == [False, True, False, True]
    first, second = watcher.step_metrics[1], watcher.step_metrics[3]
    assert first["sft/trajectories"] == 4
    assert second["sft/nll"] < first["sft/nll"]
    assert module.weights_version == 4 + 2, "every update, of either kind, is synchronised"
    assert all(m["mismatch/max_diff"] < 1e-4 for m in watcher.step_metrics)
    assert not any(r.offline for groups in watcher.groups for g in groups for r in g.responses)


def test_replay_with_prompts_brought_back_runs(vllm_engine, restore_engine_weights, tiny_model_dir, data_folder):
    # Every answer counts as right, so that there is something to replay from a policy that knows nothing.
    offline = ReplayCallback(min_accuracy=0.0, group_threshold=1.0, prompts_per_step=1, weighting=AsOnPolicy())
    watcher, _, _ = fit(tiny_model_dir, data_folder, vllm_engine, offline, steps=3)
    assert [len(groups) for groups in watcher.groups] == [4, 5, 5]
    assert watcher.metrics[0]["replay/replayed_count"] == 0
    assert watcher.metrics[1]["replay/replayed_count"] >= 1
    assert watcher.groups[1][4].responses[-1].offline


def test_callbacks_in_the_wrong_order_are_refused():
    trainer = L.Trainer(accelerator="cpu", callbacks=[MixCallback()], logger=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="needs an engine and a reward callback in front of it"):
        trainer.callbacks[0].setup(trainer, None, "fit")


class KeepsAll(DAPO):
    """Dynamic sampling that takes every group."""

    keep_groups = Algorithm.keep_groups


@pytest.mark.parametrize(
    ("offline", "algorithm", "own"),
    [(MixCallback(), DAPO, N - 1), (SFTInterleaveCallback(), KeepsAll, N)],
    ids=["mix", "sft"],
)
def test_dynamic_sampling_draws_rounds_within_a_step(
    vllm_engine, restore_engine_weights, tiny_model_dir, data_folder, offline, algorithm, own
):
    """Six groups from rounds of four: a second round of three prompts a step, one group too many; two steps in all."""
    watcher, _, module = fit(
        tiny_model_dir,
        data_folder,
        vllm_engine,
        offline,
        algorithm=algorithm(dynamic_sampling=DynamicSampling(target_groups=6)),
    )
    assert (module.rl_step, module.rounds) == (2, 4)
    assert [len(groups) for groups in watcher.groups] == [6, 6]
    # Data are used in order: a pass over the eight samples is two rounds, one step.
    seen = [{group.uid for group in groups} for groups in watcher.groups]
    assert [len(uids) for uids in seen] == [6, 6]
    for metrics, logged in zip(watcher.metrics, watcher.step_metrics, strict=True):
        assert metrics["dynamic_sampling/rounds"] == 2
        assert metrics["dynamic_sampling/prompts"] == 4 + 3, "1.25 times the two that are missing"
        assert metrics["dynamic_sampling/dropped"] == 1
        assert metrics["rollout/responses_count"] == 7 * own
        assert logged["mismatch/max_diff"] < 1e-4, "the policy did not move between the rounds"
        assert logged["train/updates"] == 1


def test_source_masks_survive_a_dump(tiny_model_dir, tmp_path):
    from policy_helpers import load_processor, make_batch

    from lightning_modules.state.batch_dump import dump_batch, load_batch

    batch = make_batch(load_processor(tiny_model_dir), ("text",))
    group = batch.groups[0]
    source = np.arange(len(group.responses[0].token_ids)) < 1
    marked = dataclasses.replace(group.responses[0], source=source)
    batch.groups[0] = dataclasses.replace(group, responses=(marked, *group.responses[1:]))
    rows = table_rows(batch, 1)
    assert [row["offline_tokens"] for row in rows] == [1, 0, 0]
    assert rows[1]["mean_logprob"] == pytest.approx(float(group.responses[1].logprobs.mean()))
    read = load_batch(dump_batch(batch, tmp_path / "b.batch")).groups[0].responses
    assert read[0].source.tolist() == source.tolist()
    assert read[1].source is None
