"""What the tiny experiments start from: a random tiny Qwen3-VL and a data set; what is already there is kept."""

from __future__ import annotations

from pathlib import Path

from datamodules.demo.cold_start import build_cold_start_dataset, cold_start_corpus
from datamodules.demo.synthetic import build_synthetic_dataset, synthetic_corpus
from datamodules.demo.tiny_model import build_tiny_model
from datamodules.prepare import load_processor


def build_videos(folder: str, seed: int) -> list[Path]:
    """Real media files with questions about them, and a model; returns the folders written."""
    data = build_synthetic_dataset(Path(folder) / "data", seed=seed)
    return [data, build_tiny_model(Path(folder) / "init", synthetic_corpus(), seed=seed)]


def build_cold_start(folder: str, seed: int) -> list[Path]:
    """Images that a random policy never reads right, with offline trajectories, and a model."""
    model = build_tiny_model(Path(folder) / "init", [*synthetic_corpus(), *cold_start_corpus()], seed=seed)
    tokenizer = load_processor(model).tokenizer

    def num_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1  # and the end token

    return [model, build_cold_start_dataset(Path(folder) / "data", seed=seed, num_tokens=num_tokens)]
