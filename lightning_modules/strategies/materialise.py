"""Create the policy with its weights: whole on one device, or sharded without any rank holding the whole model.

The sharded way builds the model with parameters on the meta device and real buffers (rotary frequencies are not in
checkpoints), shards it, and copies each rank's slice of each safetensors entry. A parameter that no entry fills is an
error, and so is an entry that no parameter takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_modules.families.checkpoint import checkpoint_entries

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_modules.families.base import ModelFamily
    from lightning_modules.families.policy import PolicyModel


@dataclass(frozen=True)
class ShardOptions:
    """How FSDP2 shards; see `strategies.fsdp.ShardedStrategy`."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cpu_offload: bool = False


def load_whole(
    family: ModelFamily,
    model_path: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    gradient_checkpointing: bool = False,
    frozen_parts: tuple[str, ...] = (),
    logprob_chunk: int = 1024,
    cpu_offload: bool = False,
) -> PolicyModel:
    """The policy on one device; with `cpu_offload` in host memory, and the caller moves it for its passes."""
    from lightning_modules.families.policy import PolicyModel

    policy = PolicyModel(family.load(model_path, dtype), family, logprob_chunk)
    _configure(policy, family, gradient_checkpointing, frozen_parts)
    return policy.to("cpu" if cpu_offload else device)


def load_sharded(
    family: ModelFamily,
    model_path: str,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    options: ShardOptions,
    device: torch.device | str = "cpu",
    gradient_checkpointing: bool = False,
    frozen_parts: tuple[str, ...] = (),
    logprob_chunk: int = 1024,
) -> PolicyModel:
    """The policy sharded over `mesh`; a collective that every rank calls."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from lightning_modules.families.policy import PolicyModel

    policy = PolicyModel(family.empty(model_path, dtype), family, logprob_chunk)
    _configure(policy, family, gradient_checkpointing, frozen_parts)
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.param_dtype) if options.param_dtype else None,
        reduce_dtype=getattr(torch, options.reduce_dtype) if options.reduce_dtype else None,
        cast_forward_inputs=False,
    )
    # Pinned memory exists beside a GPU only.
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    for unit in family.sharding_units(policy):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
    home = torch.device("cpu") if options.cpu_offload else torch.device(device)
    _allocate(policy, home, torch.device(device))
    fill_parameters(policy, family, model_path)
    return policy


def _configure(policy: PolicyModel, family: ModelFamily, checkpointing: bool, frozen_parts: tuple[str, ...]) -> None:
    if checkpointing:
        policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(family.part_of(name) not in frozen_parts)
    policy.train()


def _allocate(policy: nn.Module, home: torch.device, device: torch.device) -> None:
    """Give meta parameters storage; buffers keep their values, which `to_empty` would lose."""
    buffers = {name: buffer.detach().clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=home)
    for name, buffer in buffers.items():
        owner = policy.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = buffer.to(device)


def _read(entries: dict[str, Path], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(entries[name], []).append(name)
    for path, members in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in members:
                yield name, file.get_tensor(name)


@torch.no_grad()
def fill_parameters(policy: PolicyModel, family: ModelFamily, model_path: str) -> None:
    """Copy each checkpoint entry into its parameter, each rank its own slice.

    Raises:
        ValueError: a parameter is not in the checkpoint, or a shape differs.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    entries = checkpoint_entries(model_path)
    targets = {family.to_checkpoint_name(name): p for name, p in policy.named_parameters()}
    missing = sorted(set(targets) - set(entries))
    if missing:
        raise ValueError(f"{model_path} lacks {len(missing)} parameters, the first is {missing[0]}")
    for name, tensor in _read(entries, sorted(targets)):
        parameter = targets[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} in {model_path}, {tuple(parameter.shape)} in the model"
            )
        if isinstance(parameter, DTensor):
            local = distribute_tensor(
                tensor.to(parameter.device, parameter.dtype),
                parameter.device_mesh,
                parameter.placements,
                src_data_rank=None,
            )
            parameter.to_local().copy_(local.to_local())
        else:
            parameter.copy_(tensor)
