"""Fixtures shared by the whole suite: the test data folder, a tiny model, one engine per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before torch, vLLM or tokenizers are imported anywhere in the session.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

TINY_CORPUS = [
    "What colour is the square? A. red B. blue C. green D. yellow <answer>A</answer>",
    "How many times does the screen flash? Answer with a number. <answer>3</answer>",
    "When is the circle visible? Give start and end in seconds. <answer>[1.0, 3.0]</answer>",
    "Is there a red frame? Answer yes or no. <answer>yes</answer> <answer>no</answer>",
] * 8


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real clips and evaluation data; tests that need it skip without it, and fail under CI."""
    folder = os.environ.get("EVR1_TEST_DATA", "")
    if folder and Path(folder).is_dir():
        return Path(folder).resolve()
    message = "EVR1_TEST_DATA does not name the folder of test data (videos/, eval/)"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Qwen3-VL with processor (random weights, seed 0)."""
    from lightning_modules.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3_vl", TINY_CORPUS, seed=0)
