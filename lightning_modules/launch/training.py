"""Build everything a run needs from its configuration and let Lightning fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from datamodules.common.files import write_text
from lightning_modules.callbacks.csv_logger import AppendingCSVLogger
from lightning_modules.launch.config import build, build_data, to_plain
from lightning_modules.launch.console import is_rank_zero
from lightning_modules.launch.identity import write_identity
from lightning_modules.launch.plan import RunPlan
from lightning_modules.launch.processes import INTERRUPTED
from lightning_modules.state.run_folder import write_status


def prepare_run_folder(config: DictConfig, plan: RunPlan) -> None:
    """Write the resolved configuration, a link to the newest run, and the state "running"."""
    write_text(plan.run_dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_identity(config, plan.run_dir)
    latest = plan.run_dir.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(plan.run_dir.name)
    write_status(plan.run_dir, "running", step=plan.start_step, max_steps=int(config.max_steps))


def set_threads(devices: int, threads_per_rank: int | None) -> None:
    """Share the cores among the ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads_per_rank or max(1, cores // devices))


def build_loggers(settings: dict[str, Any], run_dir: Path, start_step: int) -> list[Any]:
    """TensorBoard and CSV loggers of the run folder, continued at `start_step`."""
    loggers: list[Any] = []
    if settings.get("tensorboard", True):
        options: dict[str, Any] = {"purge_step": start_step + 1} if start_step else {}
        loggers.append(TensorBoardLogger(save_dir=run_dir, name="", version="tensorboard", **options))
    if settings.get("csv", True):
        loggers.append(AppendingCSVLogger(run_dir, start_step))
    return loggers


def build_trainer(config: DictConfig, plan: RunPlan, callbacks: dict[str, Any]) -> L.Trainer:
    """Lightning's trainer with the chosen strategy; the data loader, not the trainer, counts the steps."""
    where = config.trainer
    strategy = build(config.strategy, accelerator=where.accelerator, devices=where.devices, num_nodes=where.num_nodes)
    return L.Trainer(
        accelerator=where.accelerator,
        devices=where.devices,
        num_nodes=where.num_nodes,
        strategy=strategy,
        callbacks=list(callbacks.values()),
        logger=build_loggers(to_plain(config.logger), plan.run_dir, plan.start_step),
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        default_root_dir=plan.run_dir,
    )


def run_training(config: DictConfig, plan: RunPlan) -> int:
    """Train from `plan.start_step` to `config.max_steps` in this process (one rank). Returns the exit code."""
    set_threads(config.trainer.devices, config.trainer.threads_per_rank)
    L.seed_everything(config.seed, workers=False, verbose=False)
    callbacks = {
        name: build(settings, **({"resume_from": plan.checkpoint} if name == "checkpoint" else {}))
        for name, settings in config.callbacks.items()
        if settings  # a null or empty entry is no callback
    }
    datamodule = build_data(config)
    datamodule.start_step, datamodule.max_steps = plan.start_step, int(config.max_steps)
    module = build(config.module)
    trainer = build_trainer(config, plan, callbacks)
    trainer.fit(module, datamodule=datamodule)
    stopped = callbacks["stop"].stopped_by_user
    if is_rank_zero():
        write_status(
            plan.run_dir, "stopped" if stopped else "finished", step=module.rl_step, max_steps=int(config.max_steps)
        )
    # Under a launcher a non-zero code would count as a crash: the supervising process reads status.json instead.
    return INTERRUPTED if stopped and "TORCHELASTIC_RUN_ID" not in os.environ else 0
