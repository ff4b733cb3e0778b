"""Trajectories on one rank only: two ranks reach the metrics and gradients of one."""

from __future__ import annotations

import pytest
import torch
from offline_rank_cases import build_updaters, mixed_batch, run_both
from policy_helpers import load_processor
from ranks import run_ranks
from safetensors.torch import load_file

from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily


def test_two_ranks_equal_one(tiny_model_dir, tmp_path):
    path = str(tiny_model_dir)
    two = run_ranks("offline_ranks", tmp_path, timeout_s=900, model=path, folder=str(tmp_path))
    family = Qwen3VLFamily().open(path)
    processor = load_processor(tiny_model_dir)
    policy = PolicyModel(family.load(path, torch.float32), family)
    one, gradients = run_both(*build_updaters(policy, family, processor), mixed_batch(processor))
    for kind, names in (
        ("rl", ("offline/advantage", "offline/length", "offline/response_share", "offline/token_share",
                "prefixed/length", "online/advantage", "online/ratio", "online/logprob", "losses/policy",
                "mismatch/kl", "groups/responses")),
        ("sft", ("losses/policy", "groups/responses", "tokens/response")),
    ):  # fmt: skip
        for name in names:
            assert two[kind][name] == pytest.approx(one[kind][name], rel=1e-5, abs=1e-7), f"{kind} {name}"
        for name, want in load_file(tmp_path / f"{kind}.safetensors").items():
            torch.testing.assert_close(want, gradients[kind][name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
    assert one["rl"]["offline/response_share"] == pytest.approx(2 / 12)
    assert one["sft"]["groups/responses"] == 1
    assert any(gradient.abs().sum() > 0 for gradient in gradients["sft"].values())
