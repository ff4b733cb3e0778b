"""strategy=ddp: every rank holds the whole model; gradients are averaged once per update."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_modules.strategies.base import PolicyStrategy

if TYPE_CHECKING:
    import torch


class ReplicatedStrategy(PolicyStrategy, DDPStrategy):
    """Data parallelism without the DistributedDataParallel wrapper.

    The wrapper reduces gradients in every backward; an RL update runs many micro-batches and needs one reduction, and
    its number of backward passes is known only after the rollout.
    """

    title = "ddp"

    def _setup_model(self, model: torch.nn.Module) -> Any:
        return model

    def _register_ddp_hooks(self) -> None:
        """No hooks: see `sync_gradients`."""
        return

    def sync_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce the gradients in flat buckets of one dtype."""
        import torch
        import torch.distributed as dist

        gradients = [p.grad for p in parameters if p.grad is not None]
        for dtype in sorted({g.dtype for g in gradients}, key=str):
            group = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in group])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, part in zip(group, flat.split([g.numel() for g in group]), strict=True):
                gradient.copy_(part.view_as(gradient))


def build(accelerator: str, devices: int, num_nodes: int, timeout_s: float = 1800.0) -> ReplicatedStrategy:
    """Create the strategy; gloo on CPU, NCCL on GPU."""
    return ReplicatedStrategy(
        process_group_backend="nccl" if accelerator in ("gpu", "cuda") else "gloo", timeout=timedelta(seconds=timeout_s)
    )
