"""What one and two ranks both run in tests of offline training."""

from __future__ import annotations

import dataclasses

import numpy as np
from policy_helpers import GradientRecorder, context, make_batch

from datamodules.types import StepBatch
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.weighting import Shaped
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from lightning_modules.offline.sft_interleave import supervised_updater
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings
from rewards.base import Score
from rollout.types import RolloutGroup


def mixed_batch(processor) -> StepBatch:
    """Four groups; of the even ones (rank 0's) the first ends in a trajectory, the second continues a prefix."""
    batch = make_batch(processor, ("video", "text", "image", "mixed"), n=3, seed=5)
    group = batch.groups[0]
    lost = np.full_like(group.responses[2].logprobs, np.nan)
    last = dataclasses.replace(group.responses[2], offline=True, logprobs=lost)
    batch.groups[0] = dataclasses.replace(group, responses=(*group.responses[:2], last))
    group = batch.groups[2]
    source = np.arange(len(group.responses[2].token_ids)) < 1
    last = dataclasses.replace(group.responses[2], source=source)
    batch.groups[2] = dataclasses.replace(group, responses=(*group.responses[:2], last))
    return batch


def build_updaters(policy, family, processor) -> tuple[PolicyUpdater, PolicyUpdater]:
    settings = UpdateSettings(micro_batch_tokens=10**6, clip_norm=None)
    updater = PolicyUpdater(
        policy, GRPO(aggregation="token-mean"), SharedPrefixLayout(), context(family, processor), settings
    )
    updater.off_policy = Shaped(gamma=0.1)
    return updater, supervised_updater(updater)


def run_both(updater: PolicyUpdater, supervised: PolicyUpdater, batch: StepBatch):
    """(metrics of both updates, their gradients); supervised targets are this rank's trajectories, if any."""
    recorder = GradientRecorder(updater.policy)
    _, bag = updater.run(batch, recorder)
    metrics, gradients = {"rl": bag.reduce()}, {"rl": recorder.recorded}
    found = [(g.prompt, r) for g in batch.groups for r in g.responses if r.offline]
    targets = StepBatch(
        prompts=[prompt for prompt, _ in found],
        groups=[RolloutGroup(i, prompt, (response,)) for i, (prompt, response) in enumerate(found)],
        scores=[(Score(1.0, 1.0, 1.0),) for _ in found],
    )
    recorder = GradientRecorder(updater.policy)
    _, bag = supervised.run(targets, recorder)
    return metrics | {"sft": bag.reduce()}, gradients | {"sft": recorder.recorded}
