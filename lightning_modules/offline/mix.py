"""Hybrid online-offline groups: the policy's answers and one offline trajectory, in the last slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.seeds import uniform
from lightning_modules.offline.base import OfflineCallback, online_accuracy
from lightning_modules.offline.schedule import Share, as_share, optional_share

if TYPE_CHECKING:
    import lightning as L

    from datamodules.types import StepBatch
    from lightning_modules.algorithms.weighting import OffPolicyWeighting
    from lightning_modules.offline.trajectories import Trajectory
    from rewards.base import Score
    from rollout.types import GenerateRequest, RolloutGroup, SamplingSpec


def replace_last(
    group: RolloutGroup, scores: Sequence[Score], response: Any, score: Score
) -> tuple[RolloutGroup, tuple[Score, ...]]:
    """The group and its scores with the last answer replaced by `response`."""
    return dataclasses.replace(group, responses=(*group.responses[:-1], response)), (*scores[:-1], score)


class MixCallback(OfflineCallback):
    """Gives groups an offline trajectory (LUFFY, arXiv 2504.14945).

    The order is fixed:

    - without `group_threshold`: n - 1 answers are generated for a chosen prompt, the trajectory is the n-th; it is
      scored with the others.
    - with `group_threshold`: n answers are generated and scored; then, in chosen groups whose mean accuracy is below
      the threshold, the trajectory replaces the last answer.

    Prompts without a usable trajectory get n own answers in both cases.

    Args:
        enable: the switch.
        ratio: share of the prompts with a usable trajectory that are chosen; a number or a schedule over RL steps.
        group_threshold: accuracy of the online group below which it gets the trajectory; None = whatever it is.
        min_score: see `OfflineCallback`.
        weighting: loss of the trajectory's tokens; None = the algorithm's own.
        seed: of the choice by `ratio`.
        trajectory_files: see `OfflineCallback`.
        require_tag: see `OfflineCallback`.
    """

    fills_last_slot = True

    def __init__(
        self,
        enable: bool = True,
        ratio: float | Share = 1.0,
        group_threshold: float | None = None,
        min_score: float | None = None,
        weighting: OffPolicyWeighting | None = None,
        seed: int = 0,
        trajectory_files: Sequence[str | Path] = (),
        require_tag: bool = True,
    ) -> None:
        super().__init__(enable, weighting, min_score, trajectory_files, require_tag)
        self.ratio = as_share(ratio)
        self.group_threshold = optional_share("group_threshold", group_threshold)
        self.seed = seed
        self._chosen: dict[int, Trajectory] = {}

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """Choose the prompts of this step that may get their trajectory."""
        self.score(batch.prompts)  # one without a verdict would mask its whole group
        usable = self.good_trajectories(batch.prompts)
        ratio = self.ratio(batch.rl_step)
        self._chosen = {
            index: usable[prompt.uid]
            for index, prompt in enumerate(batch.prompts)
            if prompt.uid in usable and uniform("offline", self.seed, batch.rl_step, prompt.uid) < ratio
        }
        batch.metrics |= {"offline/mix_ratio": ratio, "offline/usable_count": float(len(usable))}

    def edit_requests(self, requests: list[GenerateRequest]) -> list[GenerateRequest]:
        """Without a threshold, leave out the last answer of chosen prompts."""
        if self.group_threshold is not None:
            return requests
        last = {f"{index}:{self.sampling.n - 1}" for index in self._chosen}
        return [request for request in requests if request.request_id.partition(":")[2] not in last]

    def edit_group(self, group: RolloutGroup) -> RolloutGroup:
        """Without a threshold, put the trajectory where that answer would be."""
        if self.group_threshold is not None or group.index not in self._chosen:
            return group
        trajectory = self._chosen[group.index].response()
        return dataclasses.replace(group, responses=(*group.responses, trajectory))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """With a threshold, replace the last answer of failing groups; the scores are there by now."""
        if not self.enable:
            return
        if self.group_threshold is not None:
            self._replace(batch, self.group_threshold)
        injected = [r for group in batch.groups for r in group.responses if r.offline]
        batch.metrics["offline/injected_count"] = float(len(injected))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _replace(self, batch: StepBatch, threshold: float) -> None:
        failing = []
        for place, group in enumerate(batch.groups):
            accuracy = online_accuracy(group, batch.scores[place])
            if accuracy is not None and accuracy < threshold:
                failing.append(place)
        batch.metrics["offline/failing_groups_count"] = float(len(failing))
        wanted = [place for place in failing if batch.groups[place].index in self._chosen]
        scores = self.score([batch.groups[place].prompt for place in wanted])
        for place in wanted:
            group = batch.groups[place]
            if group.uid in scores:
                trajectory = self._chosen[group.index].response()
                edited = replace_last(group, batch.scores[place], trajectory, scores[group.uid])
                batch.groups[place], batch.scores[place] = edited
