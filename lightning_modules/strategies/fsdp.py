"""strategy=fsdp: parameters, gradients and optimizer states sharded with FSDP2, through ModelParallelStrategy."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_modules.strategies.base import PolicyStrategy

if TYPE_CHECKING:
    import torch

    from lightning_modules.families.base import ModelFamily
    from lightning_modules.families.policy import PolicyModel


class ShardedStrategy(PolicyStrategy, ModelParallelStrategy):
    """FSDP2 over all ranks.

    Args:
        world_size: number of data-parallel ranks (Lightning's "auto" would mean the number of nodes).
        param_dtype: dtype of gathered parameters and of the computation; None = the parameters' own.
        reduce_dtype: dtype of the gradient reduction; None = the gradients' own.
        cpu_offload: keep parameters and optimizer states in host memory between uses.
    """

    title = "fsdp"
    shards_policy = True

    def __init__(
        self,
        world_size: int,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
        )
        self._param_dtype = param_dtype
        self._reduce_dtype = reduce_dtype
        self._cpu_offload = cpu_offload

    def build_policy(
        self,
        family: ModelFamily,
        model_path: str,
        dtype: torch.dtype,
        *,
        cpu_offload: bool = False,
        **options: Any,
    ) -> PolicyModel:
        """Shard an empty model, then fill each rank's shards tensor by tensor.

        Args:
            family: architecture.
            model_path: Hugging Face folder.
            dtype: type of the parameters.
            cpu_offload: shards of this model live in host memory also where the strategy's own setting is off.
            options: see `load_sharded`.
        """
        from lightning_modules.strategies.materialise import ShardOptions, load_sharded

        shard = ShardOptions(self._param_dtype, self._reduce_dtype, self._cpu_offload or cpu_offload)
        mesh = self.device_mesh["data_parallel"]
        return load_sharded(family, model_path, dtype, mesh, shard, device=self.root_device, **options)


Precision = Literal["bfloat16", "float16", "float32"]


def build(
    accelerator: str,
    devices: int,
    num_nodes: int,
    param_dtype: Precision | None = None,
    reduce_dtype: Precision | None = None,
    cpu_offload: bool = False,
    timeout_s: float = 1800.0,
) -> ShardedStrategy:
    """Create the strategy; gloo on CPU, NCCL on GPU."""
    backend = "nccl" if accelerator in ("gpu", "cuda") else "gloo"
    return ShardedStrategy(devices * num_nodes, param_dtype, reduce_dtype, cpu_offload, backend, timeout_s)
