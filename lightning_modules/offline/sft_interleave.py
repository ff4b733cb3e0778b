"""Supervised steps on offline trajectories between RL steps (cf. ReLIFT, arXiv 2506.07527)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.types import StepBatch
from lightning_modules.algorithms.sft import Supervised
from lightning_modules.offline.base import OfflineCallback, online_accuracy
from lightning_modules.offline.schedule import optional_share
from lightning_modules.update.updater import PolicyUpdater
from rewards.base import Score
from rollout.types import RolloutGroup

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from rollout.types import SamplingSpec

_LOGGED = {
    "losses/policy": "sft/nll",
    "train/grad_norm": "sft/grad_norm",
    "groups/responses": "sft/trajectories",
    "tokens/response": "sft/tokens",
    "train/skipped_nonfinite": "sft/skipped_nonfinite",
}


class SFTInterleaveCallback(OfflineCallback):
    """After the RL update of every `every`-th step, one optimizer step of next-token training on trajectories.

    The trajectories are those of the step's prompts, or only those of groups that fail. Every rank takes part, with
    trajectories or without.

    Args:
        enable: the switch.
        every: period in RL steps.
        group_threshold: only prompts whose online accuracy is below it; None = all prompts with a trajectory.
        min_score: see `OfflineCallback`.
        trajectory_files: see `OfflineCallback`.
        require_tag: see `OfflineCallback`.
    """

    _updater: PolicyUpdater
    """Set by `on_fit_start`."""

    def __init__(
        self,
        enable: bool = True,
        every: int = 1,
        group_threshold: float | None = None,
        min_score: float | None = None,
        trajectory_files: Sequence[str | Path] = (),
        require_tag: bool = True,
    ) -> None:
        super().__init__(enable, None, min_score, trajectory_files, require_tag)
        if every < 1:
            raise ValueError(f"every={every}: a period of at least one RL step")
        self.every = every
        self.group_threshold = optional_share("group_threshold", group_threshold)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the supervised update beside the RL one."""
        super().on_fit_start(trainer, pl_module)
        if not self.enable:
            return
        self._updater = supervised_updater(pl_module.updater())

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """Read the trajectories, so that the step counts those that are rejected."""
        self.good_trajectories(batch.prompts)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        """The supervised step, before metrics are logged and checkpoints saved; a collective."""
        if not self.enable or (batch.rl_step + 1) % self.every:
            return
        targets = self.targets(batch)
        pl_module.policy.train()
        updates, bag = self._updater.run(targets, pl_module.optimizers())
        metrics = bag.reduce()
        pl_module.step_metrics |= {new: metrics[old] for old, new in _LOGGED.items() if old in metrics}
        pl_module.weights_version += int(updates > 0)
        if self._updater.bad_updates_in_a_row >= self._updater.settings.max_bad_updates:
            raise RuntimeError(
                f"the supervised loss was not finite in {self._updater.bad_updates_in_a_row} steps in a row, the last "
                f"after step {batch.rl_step}; lower the learning rate"
            )

    def targets(self, batch: StepBatch) -> StepBatch:
        """The trajectories to learn from, in the form of a scored batch."""
        prompts = self._prompts(batch)
        usable = self.good_trajectories(prompts)
        chosen = [prompt for prompt in prompts if prompt.uid in usable]
        return StepBatch(
            prompts=chosen,
            rl_step=batch.rl_step,
            groups=[RolloutGroup(i, prompt, (usable[prompt.uid].response(),)) for i, prompt in enumerate(chosen)],
            scores=[(Score(accuracy=1.0, format=1.0, total=1.0),) for _ in chosen],
        )

    def _prompts(self, batch: StepBatch) -> list[PreparedSample]:
        if self.group_threshold is None:
            return list(batch.prompts)
        rows = (
            (group, online_accuracy(group, scores)) for group, scores in zip(batch.groups, batch.scores, strict=True)
        )
        return [group.prompt for group, accuracy in rows if accuracy is not None and accuracy < self.group_threshold]


def supervised_updater(main: PolicyUpdater) -> PolicyUpdater:
    """An updater of the same policy, layout and strategy whose loss is the likelihood of given tokens."""
    settings = replace(
        main.settings, update_batch_size=None, epochs=1, entropy=False, entropy_bonus=0.0, importance=None
    )
    return PolicyUpdater(
        main.policy, Supervised(), main.layout, main.context, settings, main.backward, main.sync_gradients
    )
