"""Two FSDP2 ranks with colocated vLLM, one engine each and one engine over both, from one launch each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_two_ranks import perturb, rank_prompts

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.callback import ColocatedEngineCallback

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def single(vllm_engine, tiny_model_dir):
    """Tokens of the same three prompts on one rank: {"step:uid": tokens}."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_model_dir)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir)
    perturb(model)
    vllm_engine.update_weights(model.named_parameters())
    callback = ColocatedEngineCallback(
        lambda: vllm_engine, {"n": 2, "max_tokens": 8}, tiny_model_dir, Qwen3VLFamily(), seed=9
    )
    prompts = rank_prompts(processor, 0) + rank_prompts(processor, 1)
    tokens: dict[str, dict] = {"tokens": {}, "greedy": {}}
    for step in range(2):
        requests = callback.requests(prompts, step, greedy=True)
        responses = {key: r.token_ids.tolist() for key, r in vllm_engine.generate(requests)}
        for index, prompt in enumerate(prompts):
            key = f"{step}:{prompt.uid}"
            tokens["tokens"][key] = [responses[f"{step}:{index}:{k}"] for k in range(2)]
            tokens["greedy"][key] = responses[f"{step}:{index}:greedy"]
    vllm_engine.update_weights(load_file(tiny_model_dir / "model.safetensors").items())
    return tokens


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir, tmp_path_factory):
    """What both ranks got, per tensor-parallel size: {"1": [rank 0, rank 1], "2": [...]}."""
    out = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(HERE / "rollout_two_ranks.py"), str(tiny_model_dir), str(out)],
        env=os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {size: [rank[size] for rank in ranks] for size in ("1", "2")}


@pytest.mark.parametrize("tensor_parallel_size", ["1", "2"])
def test_two_ranks_equal_one(tensor_parallel_size, two_ranks, single):
    ranks = two_ranks[tensor_parallel_size]
    for rank in ranks:
        # With different requests per rank of one engine this is about 0.1, not an error.
        assert rank["gap"] <= 1e-5
    for kind in ("tokens", "greedy"):
        assert ranks[0][kind] | ranks[1][kind] == single[kind]


@pytest.mark.parametrize("tensor_parallel_size", ["1", "2"])
def test_lock_step_evaluation_survives_a_refused_sample(tensor_parallel_size, two_ranks):
    ranks = two_ranks[tensor_parallel_size]
    assert ranks[0]["evaluated"] == [["video:4", "answered"], ["broken", "failed"], ["text:4", "answered"]]
    assert ranks[1]["evaluated"] == []
