"""Two ranks: sharded loading equals from_pretrained; a sharded checkpoint loads into a whole model and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.state.checkpoint import load_checkpoint, save_checkpoint
from lightning_modules.strategies.materialise import ShardOptions, load_sharded, load_whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adam(policy: torch.nn.Module) -> torch.optim.Optimizer:
    """One AdamW step with gradients that every layout of the parameters computes alike."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for index, parameter in enumerate(policy.parameters()):
        parameter.grad = torch.full_like(parameter, 0.01 * (index + 1))
    optimizer.step()
    return optimizer


def worst_difference(policy: torch.nn.Module, other: torch.nn.Module) -> tuple[float, float]:
    parameters = dict(other.named_parameters())
    buffers = dict(other.named_buffers())
    mine = {n: full(p.detach()) for n, p in policy.named_parameters()}
    assert set(mine) == set(parameters)
    assert set(dict(policy.named_buffers())) == set(buffers)
    return (
        max(float((mine[n] - p).abs().max()) for n, p in parameters.items()),
        max(float((b - buffers[n]).abs().max()) for n, b in policy.named_buffers()),
    )


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    result = {}
    for name, path in arguments["models"].items():
        family = Qwen3VLFamily()
        whole = load_whole(family, path, torch.float32)
        sharded = load_sharded(family, path, torch.float32, mesh, ShardOptions())
        result[f"{name}_parameters"], result[f"{name}_buffers"] = worst_difference(sharded, whole)
        result[f"{name}_sharded"] = all(isinstance(p, DTensor) for p in sharded.parameters())

        folder = Path(arguments["folder"]) / name / "step_00000001"
        optimizer = adam(sharded)
        save_checkpoint(folder, sharded, optimizer, 1, {"note": "shared"}, {})
        whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        load_checkpoint(folder, whole, whole_optimizer)
        result[f"{name}_restored"], _ = worst_difference(sharded, whole)
        moments = {n: whole_optimizer.state[p]["exp_avg_sq"] for n, p in whole.named_parameters()}
        result[f"{name}_moments"] = max(
            float((full(optimizer.state[p]["exp_avg_sq"]) - moments[n]).abs().max())
            for n, p in sharded.named_parameters()
        )
    if dist.get_rank() == 0:
        Path(arguments["out"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
