"""Two ranks of which only the first holds trajectories: RL with weighted offline tokens, then a supervised step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from offline_rank_cases import build_updaters, mixed_batch, run_both
from policy_helpers import load_processor, rank_part
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.strategies.materialise import ShardOptions, load_sharded


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = arguments["model"]
    family = Qwen3VLFamily().open(path)
    processor = load_processor(path)
    policy = load_sharded(family, path, torch.float32, mesh, ShardOptions())
    part = rank_part(mixed_batch(processor), dist.get_rank(), dist.get_world_size())
    metrics, gradients = run_both(*build_updaters(policy, family, processor), part)
    if dist.get_rank() == 0:
        for name, values in gradients.items():
            save_file(values, Path(arguments["folder"]) / f"{name}.safetensors")
        Path(arguments["out"]).write_text(json.dumps(metrics))
    dist.barrier()  # a rank that leaves while gloo still serves the other one aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
