"""Fixtures shared by the whole suite: the test data folder, a tiny model, one engine per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_modules.families.qwen3_vl import Qwen3VLFamily

ROOT = Path(__file__).resolve().parents[1]

# Before torch, vLLM or tokenizers are imported anywhere in the session.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that spin at barriers starve each other as soon as a second process wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    from datamodules.demo.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3_vl", TINY_CORPUS, seed=0)


@pytest.fixture(scope="session")
def vllm_engine(tiny_model_dir: Path):
    """The session's only vLLM engine, on the tiny model. A test that changes its weights must restore them.

    `restore_engine_weights` below does so.
    """
    pytest.importorskip("vllm")
    from rollout.engines.vllm import VLLMEngine

    engine = VLLMEngine(
        tiny_model_dir,
        Qwen3VLFamily(),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        limit_images=2,
        limit_videos=2,
        enforce_eager=True,
    )
    yield engine
    engine.close()


@pytest.fixture
def restore_engine_weights(vllm_engine, tiny_model_dir: Path):
    """Bring the engine back to the tiny model's own weights after the test."""
    yield
    from safetensors.torch import load_file

    vllm_engine.update_weights(load_file(tiny_model_dir / "model.safetensors").items())


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny model, synthetic data and a short warm start, built by the scripts that a user's pipeline runs."""
    from train_helpers import run

    folder = tmp_path_factory.mktemp("assets")
    run("experiment=tiny_cpu", f"assets_dir={folder}", script="scripts/build_assets.py")
    run("experiment=tiny_sft", f"assets_dir={folder}", f"output_dir={folder}/outputs", "max_steps=4")
    return folder
