"""Save and load a training state: one format for every strategy, readable at any rank count.

Model and optimizer are a torch distributed checkpoint (each rank writes its shard); random states are one small file
per rank; `trainer.json` is written last. The folder gets its final name by a rename after every rank is done, so a
checkpoint is either complete or absent, whenever the process dies.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common import distributed
from datamodules.common.files import write_json
from lightning_modules.state.run_folder import STATE_FILE

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
SHARED_FILE = "shared.pt"


def rng_state() -> dict[str, Any]:
    """Random states of this rank as tensors and plain numbers (loadable with `weights_only=True`)."""
    import numpy as np
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype("int64")), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    rl_step: int,
    shared_state: dict[str, Any],
    rank_state: dict[str, Any],
) -> None:
    """Write a checkpoint; a collective that every rank calls.

    Args:
        folder: final path; replaced if it exists.
        rl_step: steps done.
        shared_state: tensors and plain values that are equal on all ranks.
        rank_state: tensors and plain values of this rank.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    rank, world = distributed.rank(), distributed.world_size()
    temporary = folder.with_name(folder.name + ".tmp")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    distributed.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
    torch.save({"rng": rng_state(), **rank_state}, temporary / f"rank_{rank}.pt")
    distributed.barrier()
    if rank == 0:
        torch.save(shared_state, temporary / SHARED_FILE)
        write_json(temporary / STATE_FILE, {"rl_step": rl_step, "format": FORMAT_VERSION, "world_size": world})
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    distributed.barrier()


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """`trainer.json` of a checkpoint.

    Raises:
        ValueError: written by an incompatible version.
    """
    state = json.loads((folder / STATE_FILE).read_text())
    if state.get("format") != FORMAT_VERSION:
        raise ValueError(f"{folder} has checkpoint format {state.get('format')}; this version reads {FORMAT_VERSION}")
    return state


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load model, optimizer and this rank's random state in place; a collective that every rank calls.

    Returns:
        (shared_state, rank_state). With another number of ranks than at saving, rank_state is empty and the random
        states stay as seeded (model, optimizer and data order do not depend on them).
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    trainer_state = read_trainer_state(folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    shared_state = torch.load(folder / SHARED_FILE, weights_only=True)
    rank, world = distributed.rank(), distributed.world_size()
    if world != trainer_state["world_size"]:
        log.info("checkpoint of %d ranks loaded into %d; random states start anew", trainer_state["world_size"], world)
        return shared_state, {}
    rank_state = torch.load(folder / f"rank_{rank}.pt", weights_only=True)
    set_rng_state(rank_state.pop("rng"))
    return shared_state, rank_state


def load_model_weights(folder: Path, model: nn.Module) -> None:
    """Load only the model's weights from a checkpoint (export, evaluation)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state["model"])
