"""Scores groups while generation is still going on, and hands the scores to the training step."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lightning as L

from rewards.base import Score
from rewards.router import RewardRouter

if TYPE_CHECKING:
    from datamodules.types import StepBatch
    from rollout.types import Response, RolloutGroup

log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """Scores of one group on their way."""

    group: RolloutGroup
    scores: list[Future[Score]]
    greedy: Future[Score] | None
    submitted: float
    finished: list[float] = field(default_factory=list)


class RewardCallback(L.Callback):
    """Subscribes to the engine callback's groups, scores each as soon as it is there, and joins before the update.

    Place it behind the engine callback in the trainer's list: its `on_train_batch_start` runs when generation has
    ended. Each rank scores its own groups. Fills `batch.scores`, `batch.greedy_scores`, `batch.timings` (score: the
    wait after generation; score_busy: first submission to last verdict; score_overlap: share of score_busy hidden
    behind generation) and `batch.metrics` (`reward/...`).

    Args:
        router: the scorer.
        timeout: seconds to wait for outstanding scores once generation has ended; what is missing then has status
            "timeout" and is masked.
    """

    def __init__(self, router: RewardRouter, timeout: float = 300.0) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be positive")
        self.router = router
        self.timeout = timeout
        self._pending: dict[int, _Pending] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Subscribe to the callback that publishes groups. Raises RuntimeError when there is none."""
        if stage != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it without declaring it
        sources = [c for c in callbacks if callable(getattr(c, "subscribe", None)) and c is not self]
        if not sources:
            raise RuntimeError(
                "RewardCallback found no callback that publishes rollout groups: add the engine callback to the "
                f"trainer's callbacks (there are: {', '.join(type(c).__name__ for c in callbacks)})"
            )
        if callbacks.index(self) < callbacks.index(sources[0]):
            raise RuntimeError(
                f"RewardCallback stands before {type(sources[0]).__name__} in the trainer's callbacks: its join would "
                "run before generation. List it after the engine callback"
            )
        sources[0].subscribe(self)
        self.router.warm_up()

    def put(self, group: RolloutGroup) -> None:
        """Start scoring one finished group; cheap types are done when this returns."""
        submitted = time.perf_counter()
        pending = _Pending(group, [], None, submitted)
        pending.scores = [self._submit(group, response, pending) for response in group.responses]
        if group.greedy is not None:
            pending.greedy = self._submit(group, group.greedy, pending)
        self._pending[group.index] = pending

    def _submit(self, group: RolloutGroup, response: Response, pending: _Pending) -> Future[Score]:
        future = self.router.submit_response(group.prompt.sample, response)
        future.add_done_callback(lambda _: pending.finished.append(time.perf_counter()))
        return future

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """Wait for the verdicts and write them into the batch. Raises RuntimeError for a group that never arrived."""
        joined = time.perf_counter()
        pending, self._pending = self._pending, {}
        missing = [group.uid for group in batch.groups if group.index not in pending]
        if missing:
            raise RuntimeError(f"groups {missing[:5]} are in the batch but were never published to RewardCallback")
        rows = [pending[group.index] for group in batch.groups]
        futures = [f for row in rows for f in (*row.scores, *([row.greedy] if row.greedy else []))]
        wait(futures, timeout=self.timeout)
        batch.scores = [tuple(self._result(f) for f in row.scores) for row in rows]
        batch.greedy_scores = [self._result(row.greedy) if row.greedy else None for row in rows]
        now = time.perf_counter()
        finished = [t for row in rows for t in list(row.finished)]
        busy = max(finished, default=now) - min((row.submitted for row in rows), default=now)
        waited = max(0.0, now - joined)
        batch.timings["score"] = waited
        batch.timings["score_busy"] = busy
        batch.timings["score_overlap"] = 1.0 - min(1.0, waited / busy) if busy > 0 else 1.0
        batch.metrics.update(reward_metrics(self.router, batch))

    def _result(self, future: Future[Score]) -> Score:
        if future.done():
            return future.result()
        return Score(0.0, 0.0, 0.0, status="timeout", reason=f"no verdict within {self.timeout:g} s after generation")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the scoring processes."""
        self._pending.clear()
        self.router.close()


def reward_metrics(router: RewardRouter, batch: StepBatch) -> dict[str, float]:
    """Scalars of one step: per type means and spread, counts of every status, masked groups.

    Means are over answers with a verdict. `reward/<type>/...` uses the route's name with underscores; names that end
    in `_count` are sums.
    """
    metrics: dict[str, float] = {}
    by_type: dict[str, list[Score]] = defaultdict(list)
    status: Counter[str] = Counter({"ok": 0, "unparsable": 0, "timeout": 0, "error": 0, "not_judged": 0})
    masked = uniform = 0
    for group, scores in zip(batch.groups, batch.scores, strict=True):
        name = router.type_name(group.prompt.sample.problem_type).replace(" ", "_")
        status.update(score.status for score in scores)
        for score in scores:
            if not score.has_verdict:
                log.warning("%s: %s (%s)", group.uid, score.status, score.reason)
        if all(score.has_verdict for score in scores):
            uniform += len({score.total for score in scores}) <= 1
        else:
            masked += 1
        by_type[name].extend(score for score in scores if score.has_verdict)
    for name, scores in by_type.items():
        metrics |= _summary(f"reward/{name}", scores)
    metrics |= _summary("reward", [s for scores in by_type.values() for s in scores])
    metrics |= {f"reward/status/{name}_count": float(count) for name, count in status.items()}
    metrics["reward/masked_groups_count"] = float(masked)
    metrics["reward/uniform_groups_count"] = float(uniform)
    return metrics


def _summary(prefix: str, scores: list[Score]) -> dict[str, float]:
    if not scores:
        return {}
    totals = [score.total for score in scores]
    mean = sum(totals) / len(totals)
    accuracy = [score.accuracy for score in scores]
    summary = {
        f"{prefix}/accuracy_mean": sum(accuracy) / len(accuracy),
        f"{prefix}/format_mean": sum(score.format for score in scores) / len(scores),
        f"{prefix}/total_mean": mean,
        f"{prefix}/total_std": (sum((t - mean) ** 2 for t in totals) / len(totals)) ** 0.5,
        f"{prefix}/full_marks_rate": sum(a >= 1.0 for a in accuracy) / len(accuracy),
        f"{prefix}/zero_rate": sum(a <= 0.0 for a in accuracy) / len(accuracy),
        f"{prefix}/answers_count": float(len(scores)),
    }
    ordered = sorted(totals)
    for share in (10, 50, 90):
        summary[f"{prefix}/total_p{share}"] = ordered[round(share / 100 * (len(ordered) - 1))]
    names = {name for score in scores for name in score.parts} - {"accuracy", "format"}
    for name in names:
        values = [score.parts[name] for score in scores if name in score.parts]
        summary[f"{prefix}/{name}_mean"] = sum(values) / len(values)
    return summary
