"""What every command does first and last: the environment of a rank, readable lines, what to type next."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from datamodules.common.places import ROOT


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


def next_steps(run_dir: Path, state: dict[str, Any]) -> str:
    """The last line of a run: where it lies and what to type next."""
    lines = [f"run folder: {run_dir}", f"  tensorboard --logdir {run_dir}"]
    if state.get("state") == "finished":
        lines.append(f"  {'python evaluate.py' if (ROOT / 'evaluate.py').is_file() else 'evr1-evaluate'} run={run_dir}")
    else:
        lines.append("  resume: the same command again")
    return "\n".join(lines)
