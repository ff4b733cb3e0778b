"""Materialisation and checkpoints across strategies."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY_CORPUS
from ranks import run_ranks


@pytest.fixture(scope="module")
def two_rank_result(tiny_model_dir, tmp_path_factory):
    from datamodules.demo.tiny_model import build_tiny_model

    tmp = tmp_path_factory.mktemp("materialise")
    tied = build_tiny_model(tmp / "tied", TINY_CORPUS, seed=1, tie_word_embeddings=True)
    models = {"untied": str(tiny_model_dir), "tied": str(tied)}
    result = run_ranks("materialise", tmp, models=models, folder=tmp / "checkpoints")
    return result, models, tmp


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_sharded_loading_equals_from_pretrained(two_rank_result, name):
    result, _, _ = two_rank_result
    assert result[f"{name}_parameters"] == 0.0
    assert result[f"{name}_buffers"] == 0.0
    assert result[f"{name}_sharded"]


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_sharded_checkpoint_restores_a_whole_model_in_the_same_job(two_rank_result, name):
    result, _, _ = two_rank_result
    assert result[f"{name}_restored"] == 0.0
    assert result[f"{name}_moments"] == 0.0


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_two_rank_checkpoint_loads_in_one_process(two_rank_result, name):
    from lightning_modules.families.qwen3_vl import Qwen3VLFamily
    from lightning_modules.state.checkpoint import load_checkpoint
    from lightning_modules.strategies.materialise import load_whole

    _, models, tmp = two_rank_result
    policy = load_whole(Qwen3VLFamily(), models[name], torch.float32)
    fresh = {n: p.detach().clone() for n, p in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    state, rank_state = load_checkpoint(tmp / "checkpoints" / name / "step_00000001", policy, optimizer)
    assert state == {"note": "shared"}
    assert rank_state == {}
    # AdamW's first step moves every weight by lr (sign of the gradient) after decoupled decay of lr * 0.01.
    for n, p in policy.named_parameters():
        expected = fresh[n] * (1 - 1e-2 * 0.01) - 1e-2
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-5)
