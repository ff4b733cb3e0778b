"""One engine over several ranks: all of them must pass identical requests, whatever prompts each rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from datamodules.common import distributed
from rollout.types import Engine, GenerateRequest, Response

if TYPE_CHECKING:
    import torch


class LockStepEngine:
    """Wraps a tensor-parallel engine: gathers the group's requests, generates all of them, keeps its own rank's.

    With different requests per rank nothing crashes, the log-probs are just wrong. The consumer must exhaust
    `generate`: a rank that stops early leaves the others waiting in a collective.

    Args:
        engine: this rank's part of the tensor-parallel engine.
        tensor_parallel_size: ranks per engine; consecutive ranks form a group.
    """

    def __init__(self, engine: Engine, tensor_parallel_size: int) -> None:
        self._engine = engine
        world, rank = distributed.world_size(), distributed.rank()
        if world % tensor_parallel_size:
            raise ValueError(f"tensor_parallel_size={tensor_parallel_size} does not divide the {world} ranks")
        self._place = rank % tensor_parallel_size
        self._size = tensor_parallel_size
        self._group = None
        # Every rank takes part in the creation of every group. Requests are host objects: gloo carries them.
        for first in range(0, world, tensor_parallel_size):
            ranks = list(range(first, first + tensor_parallel_size))
            group = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self._group = group

    @property
    def needs_weights(self) -> bool:
        """See `VLLMEngine.needs_weights`."""
        return getattr(self._engine, "needs_weights", False)

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Yield this rank's responses; a collective of the tensor-parallel group, even with nothing to generate."""
        gathered: list[list[GenerateRequest]] = [[] for _ in range(self._size)]
        dist.all_gather_object(gathered, list(requests), group=self._group)
        everyone = [
            dataclasses.replace(request, request_id=f"{place}|{request.request_id}")
            for place, part in enumerate(gathered)
            for request in part
        ]
        mine = f"{self._place}|"
        for request_id, response in self._engine.generate(everyone):
            if request_id.startswith(mine):
                yield request_id[len(mine) :], response

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every rank loads its shard of every weight."""
        self._engine.update_weights(weights)

    def sleep(self) -> None:
        """Free the engine's device memory."""
        self._engine.sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self._engine.wake()

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()
