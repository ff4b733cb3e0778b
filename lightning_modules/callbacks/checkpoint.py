"""Periodic, final and on-request checkpoints, and exact resume, for every strategy."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_modules.state.checkpoint import load_checkpoint, save_checkpoint
from lightning_modules.state.run_folder import checkpoint_path, checkpoint_steps, write_status

log = logging.getLogger(__name__)


class CheckpointCallback(L.Callback):
    """Save every `every_n_steps` RL steps, at the end, and when a stop was agreed; load before the first step.

    The module offers `policy`, `rl_step`, `rl_state()` and `load_rl_state(state)`. Callbacks with state of their own
    (buffers) use Lightning's `state_dict`/`load_state_dict` with tensors and plain values; it is kept per rank.

    Args:
        run_dir: the run's folder.
        resume_from: checkpoint to continue from, or None.
        every_n_steps: period in RL steps.
        keep_last: older checkpoints beyond this number are deleted, the best one excepted; 0 keeps all.
        max_steps: the step after which training ends.
    """

    def __init__(
        self,
        run_dir: str | Path,
        max_steps: int,
        resume_from: str | Path | None = None,
        every_n_steps: int = 10,
        keep_last: int = 2,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"callbacks.checkpoint.every_n_steps={every_n_steps}; use 1 or more")
        self._run_dir = Path(run_dir)
        self._resume_from = Path(resume_from) if resume_from else None
        self._every_n_steps = every_n_steps
        self._keep_last = keep_last
        self._max_steps = max_steps
        self._saved_step = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the checkpoint once model and optimizer exist."""
        if self._resume_from is None:
            return
        state, rank_state = load_checkpoint(self._resume_from, pl_module.policy, _optimizer(trainer))
        pl_module.load_rl_state(state["module"])
        for scheduler, last_epoch in zip(_schedulers(trainer), state["schedulers"], strict=True):
            # Only the position: base learning rates come from the configuration.
            scheduler.last_epoch = last_epoch
        for callback in trainer.callbacks:
            saved = rank_state.get(callback.state_key)
            if saved:
                callback.load_state_dict(saved)
        self._saved_step = pl_module.rl_step
        log.info("resumed after step %d from %s", pl_module.rl_step, self._resume_from)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save when it is time, when the run is over or when a stop was agreed."""
        step = pl_module.rl_step
        due = step % self._every_n_steps == 0 or step >= self._max_steps or trainer.should_stop
        if due or step in best_steps(trainer):
            self.save(trainer, pl_module)

    def save(self, trainer: Any, pl_module: Any) -> Path:
        """Write the checkpoint of the current step (once) and delete what is too old."""
        step = pl_module.rl_step
        path = checkpoint_path(self._run_dir, step)
        if step == self._saved_step:
            return path
        started = time.monotonic()
        buffers = {c.state_key: c.state_dict() for c in trainer.callbacks if c is not self and c.state_dict()}
        shared = {"module": pl_module.rl_state(), "schedulers": [s.last_epoch for s in _schedulers(trainer)]}
        save_checkpoint(path, pl_module.policy, _optimizer(trainer), step, shared, buffers)
        self._saved_step = step
        if trainer.is_global_zero:
            write_status(self._run_dir, "running", step=step, max_steps=self._max_steps)
            kept = best_steps(trainer)
            old = list(checkpoint_steps(self._run_dir).items())[: -self._keep_last] if self._keep_last > 0 else []
            for earlier, folder in old:
                if earlier not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
        log.debug("checkpoint of step %d in %.2f s", step, time.monotonic() - started)
        return path


def best_steps(trainer: Any) -> set[int]:
    """Steps that a callback calls its best (`best = {"step": ...}`, equal on all ranks); they are saved and kept."""
    found = (getattr(callback, "best", None) for callback in trainer.callbacks)
    return {best["step"] for best in found if isinstance(best, dict) and "step" in best}


def _optimizer(trainer: Any) -> torch.optim.Optimizer:
    optimizers = trainer.strategy.optimizers
    if len(optimizers) != 1:
        raise RuntimeError(f"the checkpoint holds exactly one optimizer, the module configured {len(optimizers)}")
    return optimizers[0]


def _schedulers(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]
