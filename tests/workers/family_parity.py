"""One real vLLM engine on one tiny model: sampled log-probs against the trainer's, for every modality."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from policy_helpers import context, load_processor, prepared_sample

from lightning_modules.families.policy import PolicyModel
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from rollout.engines.vllm import VLLMEngine
from rollout.types import GenerateRequest, RolloutGroup, SamplingSpec


def compare(engine, policy, family, processor, kind: str, arguments: dict, stop_ids: tuple[int, ...]) -> dict:
    """Generate on one prompt, score with the trainer."""
    prompt = prepared_sample(processor, f"parity:{kind}", kind, seed=11, size=arguments["size"], fps=1.7)
    spec = SamplingSpec(n=2, temperature=0.9, max_tokens=10, banned_ids=family.banned_ids, stop_ids=stop_ids)
    requests = [GenerateRequest(f"{kind}/{k}", prompt, spec, seed=100 + k) for k in range(2)]
    responses = dict(engine.generate(requests))
    ordered = tuple(responses[request.request_id] for request in requests)
    layout = SharedPrefixLayout()
    group = RolloutGroup(index=0, prompt=prompt, responses=ordered)
    batch = layout.collate(layout.pieces([group], [(0, (0, 1))], 10**9), context(family, processor))
    with torch.no_grad():
        trainer = policy(batch, 0.9, family.banned_ids).logprobs.float().numpy()
    engine_side = np.concatenate([r.logprobs for r in ordered])
    return {
        "ids_equal": all(r.prompt_token_ids == prompt.expanded_ids for r in ordered),
        "max_diff": float(np.abs(trainer - engine_side).max()),
        "mean_diff": float(np.abs(trainer - engine_side).mean()),
        "spread": float(np.ptp(engine_side)),
    }


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    module, name = arguments["family"].rsplit(".", 1)
    family = getattr(import_module(module), name)().open(arguments["model"])
    dtype = getattr(torch, arguments["dtype"])
    policy = PolicyModel(family.load(arguments["model"], dtype), family)
    processor = load_processor(arguments["model"])
    engine = VLLMEngine(
        arguments["model"],
        family,
        dtype=arguments["dtype"],
        max_model_len=1024,
        max_num_seqs=8,
        limit_images=2,
        limit_videos=2,
        enforce_eager=True,
    )
    stop = (processor.tokenizer.eos_token_id,)
    results = {}
    for kind in arguments["kinds"]:
        results[kind] = compare(engine, policy, family, processor, kind, arguments, stop)
    tower = next(p for n, p in policy.named_parameters() if "visual.blocks.1" in n and p.ndim >= 2)
    with torch.no_grad():
        tower.add_(0.2 * torch.randn(tower.shape, generator=torch.Generator().manual_seed(0)).to(tower.dtype))
    engine.update_weights(policy.checkpoint_weights())
    results["after_sync"] = compare(engine, policy, family, processor, "video", arguments, stop)
    engine.close()
    Path(arguments["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
