"""Build what the tiny experiments start from: a random tiny Qwen3-VL and a synthetic data set of real media files.

`python scripts/build_tiny_assets.py experiment=tiny_cpu [seed=0]`; what is already there is kept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_modules.launch.config import ConfigError, compose
from lightning_modules.launch.processes import die_with_parent
from lightning_modules.launch.training import configure_logging

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("assets")


def main(overrides: list[str], build: Callable[[DictConfig], None]) -> int:
    """Let `build` do its work under `assets_dir`; returns the exit code."""
    die_with_parent()
    configure_logging()
    try:
        config = compose("train", overrides)
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    build(config)
    return 0


def build_demo(config: DictConfig) -> None:
    """Data and model of the laptop demo."""
    from datamodules.demo.synthetic import build_synthetic_dataset, synthetic_corpus
    from datamodules.demo.tiny_model import build_tiny_model

    folder = Path(config.assets_dir) / f"seed{config.seed}"
    data = build_synthetic_dataset(folder / "data", seed=int(config.seed))
    log.info("data: %s", data)
    model = build_tiny_model(folder / "init", synthetic_corpus(), seed=int(config.seed))
    log.info("model: %s", model)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_demo))
