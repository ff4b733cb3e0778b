"""The job's ranks, as every stage sees them. Without a process group there is one rank, and nothing to wait for."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


def _group() -> ModuleType | None:
    """`torch.distributed` when a process group exists."""
    import torch.distributed as dist  # torch takes seconds to import and most callers never reach this line

    return dist if dist.is_available() and dist.is_initialized() else None


def rank() -> int:
    """This process's number among the ranks."""
    group = _group()
    return group.get_rank() if group else 0


def world_size() -> int:
    """How many ranks there are."""
    group = _group()
    return group.get_world_size() if group else 1


def barrier() -> None:
    """Wait for all ranks."""
    group = _group()
    if group and group.get_world_size() > 1:
        group.barrier()


def gather(value: Value) -> list[Value]:
    """Every rank's `value`, in the order of ranks, on every rank; a collective."""
    group = _group()
    if not group or group.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * group.get_world_size()
    group.all_gather_object(gathered, value)
    return gathered


def from_rank_zero(value: Value) -> Value:
    """Rank 0's `value` on every rank; a collective."""
    group = _group()
    if not group or group.get_world_size() == 1:
        return value
    box = [value]
    group.broadcast_object_list(box, src=0)
    return box[0]


def all_reduce(values: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
    """Reduce a tensor over all ranks; returned on its own device."""
    group = _group()
    if not group or group.get_world_size() == 1:
        return values
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if group.get_backend() == "nccl" else values.device
    moved = values.to(device)
    group.all_reduce(moved, group.ReduceOp.SUM if op == "sum" else group.ReduceOp.MAX)
    return moved.to(values.device)
