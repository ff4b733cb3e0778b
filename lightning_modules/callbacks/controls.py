"""Negative controls: changes under which learning must vanish if the rest is right."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import lightning as L

if TYPE_CHECKING:
    from datamodules.types import StepBatch


class PermutedRewardsCallback(L.Callback):
    """Deal the scores of a step's responses out at random within the rank's batch: rewards without information.

    Place it behind the reward callback.

    Args:
        seed: of the permutations, which are a function of (seed, step).
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """Permute `batch.scores`."""
        scores = [score for group in batch.scores for score in group]
        random.Random(f"{self.seed}:{batch.rl_step}").shuffle(scores)
        dealt = iter(scores)
        batch.scores = [tuple(next(dealt) for _ in group) for group in batch.scores]
