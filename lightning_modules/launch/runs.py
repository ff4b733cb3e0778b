"""Open a finished or stopped run: its configuration and its newest weights as a Hugging Face folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_modules.launch.config import RETIRED_KEYS, ConfigError, use_config_dirs
from lightning_modules.state.checkpoint import load_model_weights
from lightning_modules.state.export import export_policy
from lightning_modules.state.run_folder import checkpoint_steps
from lightning_modules.strategies.materialise import load_whole

log = logging.getLogger("train")


def load_run_config(run_dir: Path) -> DictConfig:
    """The resolved configuration a run wrote.

    Raises:
        ConfigError: the folder is not a run folder.
    """

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run folder: it holds no config.yaml")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)  # as training wrote it
    use_config_dirs(config.get("config_dir") or ())
    for parent, _, key in (name.rpartition(".") for name in RETIRED_KEYS):  # of a run of an earlier version
        if OmegaConf.is_dict(node := OmegaConf.select(config, parent)):
            node.pop(key, None)
    return config


def export_run(run_dir: Path, step: int | None = None, dtype: str | None = None, target: Path | None = None) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder; an export that exists already is kept.

    Args:
        run_dir: the run's folder.
        step: which checkpoint; None = the newest.
        dtype: of the written weights; None = as trained.
        target: None = `<run_dir>/export/step_N`.

    Raises:
        ConfigError: no such checkpoint.
    """
    steps = checkpoint_steps(run_dir)
    if not steps:
        raise ConfigError(f"{run_dir} holds no complete checkpoint")
    step = max(steps) if step is None else step
    if step not in steps:
        raise ConfigError(f"{run_dir} holds no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    target = target or run_dir / "export" / f"step_{step:08d}"
    if (target / "config.json").is_file():
        return target

    config = load_run_config(run_dir)
    family = instantiate(config.model.family, _convert_="all")
    policy = load_whole(family, config.model.path, getattr(torch, config.module.dtype))
    load_model_weights(steps[step], policy)
    export_policy(policy, config.model.path, target, getattr(torch, dtype) if dtype else None)
    log.info("exported step %d to %s", step, target)
    return target
