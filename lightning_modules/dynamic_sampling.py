"""Fill an update with groups that carry signal, over several rollout batches if need be (DAPO, arXiv 2503.14476).

No optimizer step happens while the buffer fills, so every buffered group comes from the current policy and surplus
groups can simply be dropped. Every rank takes the same decision.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.distributed as dist

from datamodules.types import StepBatch
from lightning_modules.collect import collect
from lightning_modules.metrics import all_reduce, world_size
from lightning_modules.replay import pack_batch, unpack_batch

if TYPE_CHECKING:
    from lightning_modules.algorithms.base import Algorithm

log = logging.getLogger(__name__)


class GroupBuffer:
    """Collects informative groups of one rank until the update is full over all ranks.

    Args:
        algorithm: gives the criterion (`keep_groups`) and the limits (`dynamic_sampling`).
    """

    def __init__(self, algorithm: Algorithm) -> None:
        if algorithm.dynamic_sampling is None:
            raise ValueError(f"{type(algorithm).__name__} has no dynamic sampling to run")
        self.algorithm = algorithm
        self.settings = algorithm.dynamic_sampling
        self.held: list[tuple[Any, Any]] = []
        self.lost: list[tuple[str, str]] = []
        self.rounds = 0

    def offer(self, batch: StepBatch) -> tuple[StepBatch | None, dict[str, float]]:
        """Take the informative groups of `batch`; a collective.

        Returns:
            (the batch to train on, or None while the buffer is short; metrics).

        Raises:
            RuntimeError: `max_rounds` batches held no informative group at all.
        """
        data = collect(batch)
        keep = self.algorithm.keep_groups(data.rewards)
        usable = sorted({group for group, _ in data.keys})
        chosen = [group for group, wanted in zip(usable, keep.tolist(), strict=True) if wanted]
        self.held += [(batch.groups[g], batch.scores[g]) for g in chosen]
        self.lost += batch.lost
        self.rounds += 1
        totals = all_reduce(
            torch.tensor([len(self.held), len(batch.prompts) + len(batch.lost), len(usable), len(chosen)]).double()
        )
        held, prompts, seen, kept = (int(x) for x in totals)
        target = self.settings.target_groups or prompts
        metrics = {
            "dynamic_sampling/kept_fraction": kept / max(1, seen),
            "dynamic_sampling/held": float(held),
            "dynamic_sampling/rounds": float(self.rounds),
        }
        if held < target and self.rounds < self.settings.max_rounds:
            return None, metrics
        if held == 0:
            raise RuntimeError(
                f"dynamic sampling: {self.rounds} rollout batches held no group with different rewards. The task is "
                "too hard or too easy for the policy, or the reward is constant (max_rounds in the algorithm's config)"
            )
        if held < target:
            log.warning(
                "dynamic sampling: %d of %d groups after %d batches; training on them", held, target, self.rounds
            )
        metrics["dynamic_sampling/dropped"] = float(max(0, held - target))
        return self._release(batch.rl_step, target), metrics

    def _release(self, rl_step: int, target: int) -> StepBatch:
        share = _fair_shares(_counts(len(self.held)), target)
        mine = self.held[: share[dist.get_rank() if world_size() > 1 else 0]]
        batch = StepBatch(
            prompts=[group.prompt for group, _ in mine],
            rl_step=rl_step,
            lost=self.lost,
            groups=[dataclasses.replace(group, index=i) for i, (group, _) in enumerate(mine)],
            scores=[scores for _, scores in mine],
        )
        self.held, self.lost, self.rounds = [], [], 0
        return batch

    def state(self) -> dict[str, Any]:
        """Tensors and plain values of this rank's buffer."""
        content = StepBatch(
            prompts=[], groups=[g for g, _ in self.held], scores=[s for _, s in self.held], lost=self.lost
        )
        return {"rounds": self.rounds, "batch": pack_batch(content)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        batch = unpack_batch(state["batch"])
        self.held = list(zip(batch.groups, batch.scores, strict=True))
        self.lost = batch.lost
        self.rounds = int(state["rounds"])


def _counts(mine: int) -> list[int]:
    if world_size() == 1:
        return [mine]
    counts = torch.zeros(world_size(), dtype=torch.float64)
    counts[dist.get_rank()] = mine
    return [int(c) for c in all_reduce(counts)]


def _fair_shares(counts: list[int], target: int) -> list[int]:
    """How many groups each rank keeps: surplus is taken from the fullest ranks.

    Example: counts [5, 2] and target 4 give [2, 2].
    """
    shares = list(counts)
    while sum(shares) > target:
        shares[shares.index(max(shares))] -= 1
    return shares


class BufferState(L.Callback):
    """Puts this rank's buffer into checkpoints (each rank has its own)."""

    def __init__(self, buffer: GroupBuffer) -> None:
        self.buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        """See `GroupBuffer.state`."""
        return self.buffer.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `GroupBuffer.load_state`."""
        self.buffer.load_state(state_dict)
