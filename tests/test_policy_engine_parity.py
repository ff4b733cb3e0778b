"""Parity of every family with real vLLM on CPU: prompt ids equal, log-probs equal, the engine follows a weight sync."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY_CORPUS
from tiny_families import FAMILIES, build

KINDS = ["text", "image", "video", "two_videos", "mixed"]
CASES = {
    # family: (dtype, bound on the difference of one log-prob, image size, kinds)
    "qwen2_vl": ("float32", 1e-4, 56, KINDS),
    "qwen2_5_vl": ("float32", 1e-4, 56, KINDS),
    # vLLM's CPU kernels of linear attention exist in bfloat16 only.
    "qwen3_5": ("bfloat16", 0.25, 64, KINDS),
    # vLLM takes one video per prompt of this model.
    "glm4v": ("float32", 1e-4, 56, ["text", "image", "video", "mixed"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_engine_and_trainer_agree(name, tmp_path):
    pytest.importorskip("vllm")
    dtype, bound, size, kinds = CASES[name]
    model = build(name, tmp_path / name, TINY_CORPUS)
    out = tmp_path / "out.json"
    spec = tmp_path / "arguments.json"
    arguments = {"model": model, "family": FAMILIES[name], "dtype": dtype, "size": size, "kinds": kinds, "out": out}
    spec.write_text(json.dumps(arguments, default=str))
    # An engine of its own process: the session's engine serves another model.
    command = [sys.executable, str(ROOT / "tests" / "workers" / "family_parity.py"), str(spec)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert set(results) == {*kinds, "after_sync"}
    for kind, result in results.items():
        assert result["ids_equal"], kind
        assert result["max_diff"] < bound, (kind, result)
        assert result["spread"] > 0.5, "a flat distribution would agree with anything"
