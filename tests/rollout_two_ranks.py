"""Run by torchrun in test_rollout_ranks: FSDP2 over gloo, one colocated engine per rank, then one over both ranks.

usage: rollout_two_ranks.py MODEL_DIR OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def perturb(model) -> None:
    """The same change on every rank and in the parent process."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2 * parameter.std())


def rank_prompts(processor, rank: int):
    """Rank 0 holds two prompts, rank 1 one; together they are the parent's three."""
    from rollout_helpers import make_sample

    kinds = (["video", "text"], ["image and video"])[rank]
    return [make_sample(processor, kind, seed=4) for kind in kinds]


class ShardedPolicy:
    """What the engine callback asks of a module, with FSDP2 parameters."""

    needs_greedy_baseline = True

    def __init__(self, model) -> None:
        self.model, self.weights_version = model, 0

    def engine_weights(self):
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor()


def run(model_dir: str, tensor_parallel_size: int, processor, reference, policy) -> dict:
    """Two training steps and one evaluation with an engine of the given size; what this rank got."""
    from rollout_helpers import reference_logprobs

    from datamodules.types import StepBatch
    from lightning_modules.families.qwen3_vl import Qwen3VLFamily
    from rollout.callback import ColocatedEngineCallback
    from rollout.engines.vllm import VLLMEngine

    rank = dist.get_rank()
    callback = ColocatedEngineCallback(
        lambda: VLLMEngine(
            model_dir,
            Qwen3VLFamily(),
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=16,
            limit_images=2,
            limit_videos=2,
            enforce_eager=True,
            load_weights=False,
            tensor_parallel_size=tensor_parallel_size,
        ),
        {"n": 2, "max_tokens": 8},
        model_dir,
        Qwen3VLFamily(),
        seed=9,
    )
    callback.setup(None, policy, "fit")
    prompts = rank_prompts(processor, rank)
    result = {"gap": 0.0, "tokens": {}, "greedy": {}}
    for step in range(2):
        batch = StepBatch(prompts=prompts, rl_step=step)
        callback.on_train_batch_start(None, policy, batch, 0)
        for group in batch.groups:
            for response in (*group.responses, group.greedy):
                expected = reference_logprobs(
                    reference, processor, group.prompt, response.token_ids, 1.0, callback.sampling.banned_ids
                )
                result["gap"] = max(result["gap"], float(np.abs(response.logprobs - expected).max()))
            result["tokens"][f"{step}:{group.uid}"] = [r.token_ids.tolist() for r in group.responses]
            result["greedy"][f"{step}:{group.uid}"] = group.greedy.token_ids.tolist()
    result["evaluated"] = evaluate(callback, prompts if rank == 0 else [])
    callback.teardown(None, policy, "fit")
    return result


def evaluate(callback, prompts) -> list[tuple[str, str]]:
    """Evaluation in lock-step: one sample of rank 0 is refused, rank 1 has nothing to ask and still takes part."""
    from datamodules.types import StepBatch
    from eval.heldout import evaluate_batches
    from rewards.router import RewardRouter

    prompts = list(prompts)
    if prompts:
        broken = dataclasses.replace(prompts[0], sample=dataclasses.replace(prompts[0].sample, uid="broken"))
        empty = dataclasses.replace(broken.videos[0], frames=broken.videos[0].frames[:0])
        prompts.insert(1, dataclasses.replace(broken, videos=(empty,)))
    samples = {prompt.uid: prompt.sample for prompt in prompts}
    spec = dataclasses.replace(callback.sampling, n=1, temperature=0.0)
    with callback.session():
        records = evaluate_batches([StepBatch(prompts)], samples, callback.generate_fn, RewardRouter(), spec)
    return [(record.uid, "failed" if record.state == "failed" else "answered") for record in records]


def main(model_dir: str, out_dir: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model_dir)
    reference = AutoModelForImageTextToText.from_pretrained(model_dir).eval()
    sharded = AutoModelForImageTextToText.from_pretrained(model_dir).eval()
    perturb(reference)
    perturb(sharded)
    fully_shard(sharded)
    policy = ShardedPolicy(sharded)
    results = {}
    for tensor_parallel_size in (1, 2):
        results[tensor_parallel_size] = run(model_dir, tensor_parallel_size, processor, reference, policy)
        dist.barrier()
    Path(out_dir, f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
