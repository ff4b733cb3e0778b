"""Step-wise loading: which samples form step k on rank r, and a loader that yields one `StepBatch` per step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from datamodules.common.processes import die_with_parent
from datamodules.sampling import EpochOrder, positions
from datamodules.types import Sample, StepBatch

if TYPE_CHECKING:
    from datamodules.prepare import SamplePreparer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """This process's share of every global batch."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not one of {self.world} ranks")

    def slice(self, count: int) -> slice:
        """Contiguous part of `count` items; the parts of all ranks differ in size by one at most."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def balanced(self, costs: Sequence[float]) -> list[int]:
        """Places of this rank among items of these costs: as many items as `slice` gives it, even sums of costs.

        Most expensive first to the rank with the smallest sum and room; deterministic, the places ascend.

        Example: costs [8, 6, 1, 1] on two ranks give [0, 3] and [1, 2], sums 9 and 7; the halves have 14 and 2.
        """
        count = len(costs)
        room = [len(range(*Shard(rank, self.world).slice(count).indices(count))) for rank in range(self.world)]
        sums = [0.0] * self.world
        mine = []
        for place in sorted(range(count), key=lambda i: (-costs[i], i)):
            rank = min((r for r in range(self.world) if room[r]), key=lambda r: (sums[r], r))
            room[rank] -= 1
            sums[rank] += costs[place]
            if rank == self.rank:
                mine.append(place)
        return sorted(mine)


class StepDataset(Dataset[StepBatch]):
    """Maps a step's number to this rank's prepared prompts.

    Args:
        samples: all samples.
        order: endless order over them.
        batch_size: global prompts per step.
        shard: this rank's share.
        preparer: prepares one sample.
        num_positions: end of the order (a validation pass), or None for an endless one.
        costs: work per sample, equal on all ranks; ranks get even shares of every step's. None = contiguous parts.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        order: EpochOrder,
        batch_size: int,
        shard: Shard,
        preparer: SamplePreparer,
        num_positions: int | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        self.samples = samples
        self.order = order
        self.batch_size = batch_size
        self.shard = shard
        self.preparer = preparer
        self.num_positions = num_positions
        self.costs = costs

    def step_samples(self, step: int) -> list[Sample]:
        """This rank's samples of a step, before anything is loaded."""
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        if self.num_positions is not None:
            stop = min(stop, self.num_positions)
        chosen = positions(self.order, start, stop)
        if self.costs is None:
            return [self.samples[i] for i in chosen[self.shard.slice(len(chosen))]]
        return [self.samples[chosen[place]] for place in self.shard.balanced([self.costs[i] for i in chosen])]

    def __getitem__(self, step: int) -> StepBatch:
        """Prepare a step; what cannot be prepared is listed in `lost`."""
        batch, began = StepBatch(prompts=[], rl_step=step), time.perf_counter()
        for sample in self.step_samples(step):
            try:
                batch.prompts.append(self.preparer.prepare(sample))
            except ValueError as error:
                # MediaError and OverlongError are ValueErrors: the user's data, not our code.
                batch.lost.append((sample.uid, str(error)))
                logger.warning("sample %s is lost in step %d: %s", sample.uid, step, error)
        batch.timings["prepare"] = time.perf_counter() - began
        return batch


class StepLoader:
    """Yields the batches of the steps [start, stop), prepared by worker processes ahead of time.

    Not a `DataLoader` itself, so that no framework replaces its sampler: the order is ours.

    Args:
        dataset: prepares steps.
        start: first step.
        stop: one past the last step.
        num_workers: worker processes; 0 = prepare in this process.
        prefetch: steps each worker prepares ahead.
        start_method: how workers start: `fork`, `spawn` or `forkserver`.
    """

    def __init__(
        self,
        dataset: StepDataset,
        start: int,
        stop: int,
        num_workers: int = 0,
        prefetch: int = 2,
        start_method: str = "fork",
    ) -> None:
        self.dataset = dataset
        self.start, self.stop = start, max(start, stop)
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.start_method = start_method

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[StepBatch]:
        workers = min(self.num_workers, len(self))
        options: dict[str, Any] = {}
        if workers:
            # torch's worker notices a dead parent, but then waits forever for a reader of a batch in the pipe.
            options = {
                "prefetch_factor": self.prefetch,
                "multiprocessing_context": self.start_method,
                "worker_init_fn": partial(_end_with, os.getpid()),
            }
        return iter(
            DataLoader(
                self.dataset,
                batch_size=None,
                sampler=range(self.start, self.stop),
                num_workers=workers,
                **options,
            )
        )


def prompt_cost(tokens: int) -> float:
    """Work of a prompt in arbitrary units: linear layers plus attention, which is quadratic."""
    return tokens + tokens * tokens / 16384


def _end_with(parent: int, worker_id: int) -> None:
    die_with_parent(parent)
