"""Build everything a run needs from its configuration and let Lightning fit."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.files import write_text
from lightning_modules.launch.config import build, build_data, to_plain
from lightning_modules.launch.identity import write_identity
from lightning_modules.launch.plan import RunPlan
from lightning_modules.launch.processes import INTERRUPTED
from lightning_modules.state.run_folder import write_status

if TYPE_CHECKING:
    import lightning as L
    from omegaconf import DictConfig

log = logging.getLogger("train")


def export_rank_environment() -> None:
    """Give SLURM ranks the variables torch.distributed and vLLM read (torchrun sets them itself)."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) < 2:
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]


def is_rank_zero() -> bool:
    """Whether this process is rank 0 (or the only one)."""
    return int(os.environ.get("RANK", "0")) == 0


QUIET_WARNINGS = (
    r".*You passed in a `val_dataloader` but have no `validation_step`.*",  # evaluation runs in a callback of ours
    r".*You have overridden `transfer_batch_to_device` in `LightningModule`.*",  # batches stay on the host on purpose
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",  # inside Lightning
    r".*torch.distributed is disabled, unavailable or uninitialized.*",  # one process needs no process group
    r".*The dataloader, train_dataloader, does not have many workers.*",
    r".*`torch.distributed.reduce_op` is deprecated.*",  # inside vLLM
)


def quiet_libraries() -> None:
    """Drop messages of libraries that tell the user nothing to act on."""
    import warnings

    for message in QUIET_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # C++ warnings about thread and memory binding at every start.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def configure_logging(run_dir: Path | None = None) -> None:
    """Console lines on rank 0, warnings elsewhere; a log file per rank in the run folder."""
    quiet_libraries()
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    console.setLevel(logging.INFO if is_rank_zero() else logging.WARNING)
    root.addHandler(console)
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "filelock", "lightning.pytorch.utilities.rank_zero", "vllm", "ray", "torch", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if run_dir is not None:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(run_dir / "logs" / f"rank_{os.environ.get('RANK', '0')}.log")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(file)


def prepare_run_folder(config: DictConfig, plan: RunPlan) -> None:
    """Write the resolved configuration, a link to the newest run, and the state "running"."""
    from omegaconf import OmegaConf

    write_text(plan.run_dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    write_identity(config, plan.run_dir)
    latest = plan.run_dir.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(plan.run_dir.name)
    write_status(plan.run_dir, "running", step=plan.start_step, max_steps=int(config.max_steps))


def set_threads(devices: int, threads_per_rank: int | None) -> None:
    """Share the cores among the ranks of this machine."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads_per_rank or max(1, cores // devices))


def build_loggers(settings: dict[str, Any], run_dir: Path, start_step: int) -> list[Any]:
    """TensorBoard and CSV loggers of the run folder, continued at `start_step`."""
    loggers: list[Any] = []
    if settings.get("tensorboard", True):
        from lightning.pytorch.loggers import TensorBoardLogger

        options = {"purge_step": start_step + 1} if start_step else {}
        loggers.append(TensorBoardLogger(save_dir=run_dir, name="", version="tensorboard", **options))
    if settings.get("csv", True):
        from lightning_modules.callbacks.csv_logger import AppendingCSVLogger

        loggers.append(AppendingCSVLogger(run_dir, start_step))
    return loggers


def build_trainer(config: DictConfig, plan: RunPlan, callbacks: dict[str, Any]) -> L.Trainer:
    """Lightning's trainer with the chosen strategy; the data loader, not the trainer, counts the steps."""
    import lightning as L

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
    import lightning as L

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


def write_failure(plan: RunPlan, error: BaseException) -> None:
    """Record why a run ended, for the next process and for people."""
    write_status(plan.run_dir, "failed", error=f"{type(error).__name__}: {error}")


def next_steps(run_dir: Path, state: dict[str, Any]) -> str:
    """The last line of a run: where it lies and what to type next."""
    lines = [f"run folder: {run_dir}", f"  tensorboard --logdir {run_dir}"]
    if state.get("state") == "finished":
        lines.append(f"  python evaluate.py run={run_dir}")
    else:
        lines.append("  resume: the same command again")
    return "\n".join(lines)
