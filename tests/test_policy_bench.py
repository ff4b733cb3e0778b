"""The claims of the benchmarks: sharing a prompt saves work, chunked log-probs do not hold the vocabulary matrix."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT


def run_bench(name: str, *arguments: str) -> dict | list:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "model.py"), name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def tokens_saved(result: dict) -> float:
    """Tokens that the model reads without sharing over those with it: work, whatever the machine does beside it."""
    rows = {name: row["row_tokens"] for name, row in result["layouts"].items()}
    return rows["packed"] / rows["shared_prefix"]


@pytest.mark.slow
def test_shared_prefix_reads_a_sixth_of_the_tokens_in_half_the_memory():
    """2,000 visual tokens, 8 responses of 64 tokens, whole model, against the fastest layout without sharing."""
    (result,) = run_bench("layouts", "--threads", "1", "--repeats", "1")
    assert tokens_saved(result) > 6, result
    assert result["memory_ratio"] > 2, result
    norms = [row["grad_norm"] for row in result["layouts"].values()]
    assert max(norms) == pytest.approx(min(norms), rel=1e-5)


def test_shared_prefix_pays_at_small_size_too():
    (result,) = run_bench("layouts", "--visual-tokens", "400", "--threads", "1", "--repeats", "1", "--hidden", "64",
                          "--layers", "2", "--layouts", "packed", "shared_prefix")  # fmt: skip
    assert tokens_saved(result) > 3, result


def test_chunked_logprobs_at_qwens_vocabulary():
    result = run_bench(
        "logprobs", "--vocab", "151936", "--tokens", "512", "--chunks", "32", "--threads", "1", "--dim", "32"
    )
    full, chunked = result["variants"]
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-6)
    assert chunked["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-5)
    assert result["memory_ratio"] > 3, result
