"""Build what `experiment=tiny_mix_policy` starts from: a random tiny Qwen3-VL and the cold-start data set.

`python scripts/build_mix_assets.py experiment=tiny_mix_policy [seed=0]`; what is already there is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.build_tiny_assets import log, main

if TYPE_CHECKING:
    from omegaconf import DictConfig


def build_cold_start(config: DictConfig) -> None:
    """Model and data of the cold start."""
    from datamodules.demo.cold_start import build_cold_start_dataset, cold_start_corpus
    from datamodules.demo.synthetic import synthetic_corpus
    from datamodules.demo.tiny_model import build_tiny_model
    from datamodules.prepare import load_processor

    folder = Path(config.assets_dir) / f"mix{config.seed}"
    corpus = [*synthetic_corpus(), *cold_start_corpus()]
    model = build_tiny_model(folder / "init", corpus, seed=int(config.seed))
    log.info("model: %s", model)
    tokenizer = load_processor(model).tokenizer

    def num_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1  # and the end token

    log.info("data: %s", build_cold_start_dataset(folder / "data", seed=int(config.seed), num_tokens=num_tokens))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_cold_start))
