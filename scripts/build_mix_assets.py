"""Build what `experiment=tiny_mix_policy` starts from: a random tiny Qwen3-VL and the cold-start data set.

`python scripts/build_mix_assets.py experiment=tiny_mix_policy [seed=0]`; what is already there is kept.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_modules.launch.config import ConfigError, compose
from lightning_modules.launch.processes import die_with_parent
from lightning_modules.launch.training import configure_logging

log = logging.getLogger("assets")


def main(overrides: list[str]) -> int:
    """Build model and data under `assets_dir`; returns the exit code."""
    die_with_parent()
    configure_logging()
    try:
        config = compose("train", overrides)
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    from datamodules.cold_start import build_cold_start_dataset, cold_start_corpus
    from datamodules.prepare import load_processor
    from datamodules.synthetic import synthetic_corpus
    from lightning_modules.tiny import build_tiny_model

    folder = Path(config.assets_dir) / f"mix{config.seed}"
    corpus = [*synthetic_corpus(), *cold_start_corpus()]
    model = build_tiny_model(folder / "init", corpus, seed=int(config.seed))
    log.info("model: %s", model)
    tokenizer = load_processor(model).tokenizer

    def num_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1  # and the end token

    log.info("data: %s", build_cold_start_dataset(folder / "data", seed=int(config.seed), num_tokens=num_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
