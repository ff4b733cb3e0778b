"""What all offline paradigms share: their place in the training loop, their trajectories, scores and weighting."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from lightning_modules.offline.schedule import optional_share
from lightning_modules.offline.trajectories import Limits, RejectedError, TrajectoryReader, read_trajectory_files
from rewards.base import Score

if TYPE_CHECKING:
    from datamodules.types import PreparedSample, StepBatch
    from lightning_modules.algorithms.weighting import OffPolicyWeighting
    from lightning_modules.offline.trajectories import Trajectory
    from rollout.types import GenerateRequest, RolloutGroup, SamplingSpec

log = logging.getLogger(__name__)


class OfflineCallback(L.Callback):
    """Base of the paradigms; a `RolloutEditor` of the engine callback that changes nothing by itself.

    It stands behind the reward callback, so that `on_train_batch_start` sees the group's scores. Switched off, it
    neither subscribes nor touches the module: training is plain on-policy training, bit for bit.

    Args:
        enable: the switch.
        weighting: loss of the tokens that the policy did not sample; None = the algorithm's own.
        min_score: trajectories that score less are rejected; None = not asked.
        trajectory_files: trajectories beside the records' own, see `read_trajectory_files`.
        require_tag: reject trajectories whose answer does not stand in an answer tag.

    Raises:
        ValueError: a value is out of range, or a trajectory file cannot be read.
    """

    fills_last_slot = False
    """Whether a group's last answer is given away."""
    reader: TrajectoryReader
    """Reads trajectories; set by `on_fit_start`."""
    sampling: SamplingSpec
    """The engine's sampling; set by `on_fit_start`."""

    def __init__(
        self,
        enable: bool = True,
        weighting: OffPolicyWeighting | None = None,
        min_score: float | None = None,
        trajectory_files: Sequence[str | Path] = (),
        require_tag: bool = True,
    ) -> None:
        self.enable = enable
        self.weighting = weighting
        self.min_score = optional_share("min_score", min_score)
        self._from_files = read_trajectory_files(trajectory_files) if enable else {}
        self._require_tag = require_tag
        self._router: Any = None
        self._score_timeout = 300.0
        self._scores: dict[str, Score] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Subscribe to the engine callback. Raises RuntimeError when it or the reward callback is missing or later."""
        if stage != "fit" or not self.enable:
            return
        order = list(trainer.callbacks)
        engine = next((c for c in order if callable(getattr(c, "subscribe_editor", None))), None)
        reward = next((c for c in order if hasattr(c, "router") and callable(getattr(c, "put", None))), None)
        if engine is None or reward is None or order.index(self) < max(order.index(engine), order.index(reward)):
            raise RuntimeError(
                f"{type(self).__name__} needs an engine and a reward callback in front of it in the trainer's "
                f"callbacks (there are: {', '.join(type(c).__name__ for c in order)})"
            )
        engine.subscribe_editor(self)
        self._engine, self._router, self._score_timeout = engine, reward.router, reward.timeout

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Know the samples, the tokenizer and the engine's limits, and hand the weighting to the update."""
        if not self.enable:
            return
        self.sampling = self._engine.sampling
        self.check(self.sampling)
        pl_module.updater().off_policy = self.weighting
        data = trainer.datamodule
        limits = Limits(
            max_tokens=self.sampling.max_tokens,
            banned_ids=self.sampling.banned_ids,
            stop_ids=self.sampling.stop_ids,
            need_logprobs=self.weighting is not None and self.weighting.needs_logprobs,
            require_tag=self._require_tag,
        )
        self.reader = TrajectoryReader(data.processor, data.templates, limits, self._from_files)
        if trainer.is_global_zero:  # every rank knows the same samples and files
            self.reader.check_samples(sample.uid for sample in data.train_samples)

    def check(self, sampling: SamplingSpec) -> None:
        """Raise ValueError when the paradigm does not fit the engine's sampling."""
        if self.fills_last_slot and sampling.n < 2:
            raise ValueError(
                f"rollout.sampling.n={sampling.n}: an answer from elsewhere needs at least one own answer beside it"
            )

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """See `RolloutEditor`."""

    def edit_requests(self, requests: list[GenerateRequest]) -> list[GenerateRequest]:
        """See `RolloutEditor`."""
        return requests

    def edit_group(self, group: RolloutGroup) -> RolloutGroup:
        """See `RolloutEditor`."""
        return group

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: StepBatch, batch_idx: int) -> None:
        """Count the prompts whose trajectory was refused; subclasses that change scored groups do so first."""
        if self.enable:
            refused = [prompt.uid for prompt in batch.prompts if prompt.uid in self.reader.rejected]
            batch.metrics["offline/rejected_count"] = float(len(refused))

    def score(self, prompts: Sequence[PreparedSample]) -> dict[str, Score]:
        """Scores of the usable trajectories of `prompts` by uid; each trajectory is scored once per run.

        One that gets no verdict is rejected.
        """
        pending = {}
        for prompt in prompts:
            trajectory = self.reader.get(prompt)
            if trajectory is not None and prompt.uid not in self._scores and prompt.uid not in pending:
                pending[prompt.uid] = self._router.submit_response(prompt.sample, trajectory.response())
        wait(pending.values(), timeout=self._score_timeout)
        late = Score(0.0, 0.0, 0.0, status="timeout", reason=f"no verdict within {self._score_timeout:g} s")
        for uid, future in pending.items():
            score = future.result() if future.done() else late
            if not score.has_verdict:
                self.reader.reject(RejectedError(uid, "score", f"{score.status}: {score.reason}"))
                continue
            self._scores[uid] = score
        return {p.uid: self._scores[p.uid] for p in prompts if p.uid in self._scores}

    def good_trajectories(self, prompts: Sequence[PreparedSample]) -> dict[str, Trajectory]:
        """Usable trajectories by uid; with `min_score` only those that score at least that much (others: rejected)."""
        if self.min_score is not None:
            for uid, score in self.score(prompts).items():
                if score.total < self.min_score:
                    detail = f"it scores {score.total:.3f}, min_score is {self.min_score}"
                    self.reader.reject(RejectedError(uid, "score", detail))
        found = {prompt.uid: self.reader.get(prompt) for prompt in prompts}
        return {uid: trajectory for uid, trajectory in found.items() if trajectory is not None}


def online_accuracy(group: RolloutGroup, scores: Sequence[Score]) -> float | None:
    """Mean accuracy of the group's own answers; None when one of them has no verdict, or there are none."""
    own = [score for response, score in zip(group.responses, scores, strict=True) if not response.offline]
    if not own or not all(score.has_verdict for score in own):
        return None
    return sum(score.accuracy for score in own) / len(own)
