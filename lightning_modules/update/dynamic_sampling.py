"""Fill an update with groups that carry signal, over several rollout batches if need be (DAPO, arXiv 2503.14476).

All rounds belong to one RL step: the policy does not move between them, so every kept group is on-policy and surplus
groups can simply be dropped. Every rank takes the same decision. Callbacks, schedules and checkpoints see steps only.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from datamodules.common import distributed
from lightning_modules.core.metrics import merge
from lightning_modules.update.collect import collect

if TYPE_CHECKING:
    import lightning as L

    from datamodules.types import StepBatch
    from lightning_modules.algorithms.base import Algorithm

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""A step that fills for longer says after each round how far it is."""


class GroupFilter:
    """Collects informative groups until the update is full over all ranks.

    Args:
        algorithm: gives the criterion (`keep_groups`) and the limits (`dynamic_sampling`).
    """

    def __init__(self, algorithm: Algorithm) -> None:
        if algorithm.dynamic_sampling is None:
            raise ValueError(f"{type(algorithm).__name__} has no dynamic sampling to run")
        self.algorithm = algorithm
        self.settings = algorithm.dynamic_sampling
        self._warned = False

    def fill(self, batch: StepBatch, more: Callable[[int], StepBatch | None]) -> int:
        """Make `batch` hold the informative groups of as many rounds as it takes; a collective.

        Args:
            batch: the first round, scored; its groups are replaced, its timings and metrics become the step's.
            more: the next round, generated and scored, of at most so many prompts per rank; None when the data end.

        Returns:
            Rounds drawn, `batch` included.

        Raises:
            RuntimeError: no round held an informative group.
        """
        started, rounds, held = time.monotonic(), [batch], self._informative(batch)
        target = self.settings.target_groups or int(_total(len(batch.prompts) + len(batch.lost)))
        while (count := int(_total(len(held)))) < target and len(rounds) < self.settings.max_rounds:
            if time.monotonic() - started > QUIET_S:
                log.info(
                    "dynamic sampling: %d of %d groups after %d rollout batches (at most %d)",
                    count,
                    target,
                    len(rounds),
                    self.settings.max_rounds,
                )
            # Prompts per rank that should close the gap: at the step's rate of informative groups, and a quarter more.
            drawn = _total(sum(len(r.groups) for r in rounds))
            needed = math.ceil(1.25 * (target - count) * drawn / max(count, 1) / distributed.world_size())
            following = more(max(1, needed))
            if following is None:
                break
            rounds.append(following)
            held += self._informative(following)
        self._check_found(count, target, len(rounds))
        metrics = self._metrics(rounds, count, target)
        share = _fair_shares(distributed.gather(len(held)), target)
        mine = held[: share[distributed.rank()]]
        batch.timings = merge_timings([r.timings for r in rounds])
        batch.metrics = merge([r.metrics for r in rounds]) | metrics
        batch.lost = [item for r in rounds for item in r.lost]
        batch.prompts = [group.prompt for group, _, _ in mine]
        batch.groups = [dataclasses.replace(group, index=i) for i, (group, _, _) in enumerate(mine)]
        batch.scores = [scores for _, scores, _ in mine]
        batch.greedy_scores = [greedy for _, _, greedy in mine]
        return len(rounds)

    def _informative(self, batch: StepBatch) -> list[tuple[Any, Any, Any]]:
        """(group, scores, greedy score) of the round's groups that the algorithm keeps."""
        data = collect(batch)
        self.algorithm.check_rewards(data.rewards, data.uids)
        keep = self.algorithm.keep_groups(data.rewards).tolist()
        greedy = batch.greedy_scores or [None] * len(batch.groups)
        usable = sorted({group for group, _ in data.keys})
        chosen = [group for group, wanted in zip(usable, keep, strict=True) if wanted]
        return [(batch.groups[g], batch.scores[g], greedy[g]) for g in chosen]

    def _check_found(self, count: int, target: int, rounds: int) -> None:
        if count == 0:
            raise RuntimeError(
                f"dynamic sampling: {rounds} rollout batches held no group with different rewards. The task is too "
                "hard or too easy for the policy, or the reward is constant; allow more batches with "
                "algorithm.dynamic_sampling.max_rounds, or train on every group with algorithm.dynamic_sampling=null"
            )
        if count < target:
            # Near the end of a successful run this is every step's state, and in the metrics.
            log.log(
                logging.DEBUG if self._warned else logging.WARNING,
                "dynamic sampling: %d of %d groups after %d rollout batches; the step is made with them. Later "
                "steps are not mentioned; "
                "algorithm.dynamic_sampling.max_rounds and target_groups set the limits",
                count,
                target,
                rounds,
            )
            self._warned = True

    def _metrics(self, rounds: Sequence[StepBatch], count: int, target: int) -> dict[str, float]:
        """What was drawn: equal on every rank. Accuracy is that of all responses, before the selection."""
        correct = torch.cat([collect(r).rewards.parts["accuracy"] for r in rounds]).double()
        groups = sum(len(r.groups) for r in rounds)
        totals = distributed.all_reduce(torch.tensor([float(correct.sum()), len(correct), groups], dtype=torch.float64))
        right, responses, drawn = totals.tolist()
        return {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/prompts": drawn,
            "dynamic_sampling/kept_fraction": count / max(1.0, drawn),
            "dynamic_sampling/accuracy": right / max(1.0, responses),
            "dynamic_sampling/dropped": float(max(0, count - target)),
        }


def next_round(trainer: Any, module: L.LightningModule, batch_idx: int, limit: int) -> StepBatch | None:
    """The loader's next batch, generated and scored by the same hooks as a step's first; None when the data end.

    Prompts beyond `limit` are left out: what they would give is surplus, and generation is what a round costs.
    """
    # Lightning hands out one batch per step; its fetcher is the only place that keeps the loader's prefetching.
    fetcher = trainer.fit_loop._data_fetcher
    try:
        batch = next(fetcher)[0]
    except StopIteration:
        return None
    batch.prompts = batch.prompts[:limit]
    for callback in trainer.callbacks:
        callback.on_train_batch_start(trainer, module, batch, batch_idx)
    return batch


def merge_timings(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of all rounds together; the share of scoring hidden behind generation follows from the sums."""
    names = dict.fromkeys(name for timings in rounds for name in timings)
    merged = {name: sum(timings.get(name, 0.0) for timings in rounds) for name in names}
    if merged.get("score_busy", 0.0) > 0:
        merged["score_overlap"] = 1.0 - min(1.0, merged["score"] / merged["score_busy"])
    return merged


def _total(mine: float) -> float:
    return float(distributed.all_reduce(torch.tensor([mine], dtype=torch.float64)))


def _fair_shares(counts: list[int], target: int) -> list[int]:
    """How many groups each rank keeps: surplus is taken from the fullest ranks.

    Example: counts [5, 2] and target 4 give [2, 2].
    """
    shares = list(counts)
    while sum(shares) > target:
        shares[shares.index(max(shares))] -= 1
    return shares
