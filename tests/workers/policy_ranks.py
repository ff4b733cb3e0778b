"""Two ranks run updates on replayed rollouts; rank 0 writes metrics and full gradients of every case."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from policy_helpers import GradientRecorder, context, load_processor, make_batch, mark_informative, rank_part
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from datamodules.types import StepBatch
from lightning_modules.algorithms.base import DynamicSampling
from lightning_modules.algorithms.dapo import DAPO
from lightning_modules.algorithms.gdpo import GDPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.kl import KLPenalty
from lightning_modules.families.base import PARTS
from lightning_modules.layouts.packed import PackedLayout
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from lightning_modules.strategies.ddp import ReplicatedStrategy
from lightning_modules.strategies.materialise import ShardOptions, load_sharded, load_whole
from lightning_modules.update.collect import collect
from lightning_modules.update.dynamic_sampling import GroupFilter
from lightning_modules.update.mismatch import MismatchGate
from lightning_modules.update.updater import PolicyUpdater, UpdateSettings

LAYOUTS = {layout.name: layout for layout in (PaddedLayout, PackedLayout, SharedPrefixLayout)}


def build(case: dict, family, path: str, mesh):
    options = {
        "frozen_parts": tuple(case.get("frozen", ())),
        "gradient_checkpointing": case.get("checkpointing", False),
    }
    if case.get("strategy", "fsdp") == "fsdp":
        return load_sharded(family, path, torch.float32, mesh, ShardOptions(), **options), None
    strategy = ReplicatedStrategy(process_group_backend="gloo")
    return load_whole(family, path, torch.float32, **options), strategy.sync_gradients


def run_case(case: dict, family, path: str, mesh, processor, cache: dict) -> tuple[dict, dict]:
    key = json.dumps([case.get(k) for k in ("strategy", "frozen", "checkpointing")])
    if key not in cache:
        cache[key] = build(case, family, path, mesh)
    policy, sync = cache[key]
    settings = UpdateSettings(
        micro_batch_tokens=case.get("budget", 10**6), clip_norm=None, update_batch_size=case.get("update_batch_size")
    )
    layout = LAYOUTS[case.get("layout", "shared_prefix")]()
    kl = KLPenalty(beta=0.1, kind="k2") if case.get("kl") else None
    home = ShardOptions(cpu_offload=case.get("reference_offload", False))
    reference = load_sharded(family, path, torch.float32, mesh, home, frozen_parts=PARTS) if kl else None
    if reference is not None:
        # Another reference than the policy, so that the penalty has a gradient.
        for parameter in reference.parameters():
            parameter.data.mul_(1.01)
    algorithm = GRPO(clip_high=0.28, kl=kl)
    if "part_rank" in case:
        algorithm = GDPO(weights={"accuracy": 1.0, "tiou": 1.0})
    updater = PolicyUpdater(
        policy,
        algorithm,
        layout,
        context(family, processor),
        settings,
        sync_gradients=sync,
        reference=reference,
        gate=MismatchGate(max_kl=1e-3, patience=case["gate_patience"]) if "gate_patience" in case else None,
    )
    batch = make_batch(processor, tuple(case["kinds"]), n=3, seed=case.get("seed", 7), size=case.get("size", 64))
    part = rank_part(batch, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() in case.get("lost_ranks", ()):
        part.groups, part.scores = [], []
    if dist.get_rank() == case.get("poison_rank"):
        part.scores[0] = tuple(dataclasses.replace(score, total=float("nan")) for score in part.scores[0])
    if dist.get_rank() == case.get("part_rank"):
        part.scores = [tuple(dataclasses.replace(s, parts={"tiou": s.total}) for s in scores) for scores in part.scores]
    if "informative" in case:
        fill_from_rounds(case, part)
    if "gate_patience" in case:
        spoil_one_rank(case, updater, part)
    recorder = GradientRecorder(policy)
    try:
        updates, bag = updater.run(part, recorder)
    except RuntimeError as error:
        return {"error": str(error)}, recorder.recorded
    return {**bag.reduce(), **part.metrics, "updates": updates}, recorder.recorded


def fill_from_rounds(case: dict, part: StepBatch) -> None:
    """Dynamic sampling where round i of rank r holds informative groups at `informative[r][i]`."""
    first, *rest = case["informative"][dist.get_rank()]
    sampling = DynamicSampling(target_groups=case["target"])
    again = (mark_informative(dataclasses.replace(part, scores=list(part.scores)), flags) for flags in rest)
    GroupFilter(DAPO(dynamic_sampling=sampling)).fill(mark_informative(part, first), lambda limit: next(again, None))


def spoil_one_rank(case: dict, updater: PolicyUpdater, part: StepBatch) -> None:
    """Engine log-probs equal to the trainer's, except on rank `stale_rank`."""
    data = collect(part)
    for (g, r), logprobs in updater.score(updater.policy, data, data.keys).items():
        shift = 0.5 if dist.get_rank() == case["stale_rank"] else 0.0
        part.groups[g].responses[r].logprobs[:] = logprobs.numpy() - shift


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module, name = arguments["family"].rsplit(".", 1)
    family = getattr(import_module(module), name)().open(arguments["model"])
    processor = load_processor(arguments["model"])
    results, cache = {}, {}
    for case in arguments["cases"]:
        metrics, gradients = run_case(case, family, arguments["model"], mesh, processor, cache)
        results[case["name"]] = metrics
        if dist.get_rank() == 0 and gradients:
            save_file(gradients, Path(arguments["folder"]) / f"{case['name']}.safetensors")
    if dist.get_rank() == 0:
        Path(arguments["out"]).write_text(json.dumps(results))
    cache.clear()
    dist.barrier()  # a rank that leaves while gloo still serves the other one aborts
    # Results are on disk; taking gloo's threads apart is not what is tested, and aborts now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
