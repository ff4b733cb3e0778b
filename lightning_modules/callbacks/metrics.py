"""Every step's scalars, reduced over ranks, to all loggers under one step number, and one line on the console."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L

from datamodules.common.distributed import gather
from lightning_modules.core.metrics import merge

log = logging.getLogger("train")


class MetricsCallback(L.Callback):
    """Log `module.step_metrics` (already reduced), the batch's reward metrics and the phase timings.

    Args:
        max_steps: for the progress line's ETA.
        console: metrics shown on the console line, in order; missing ones are left out.
        console_every_n_steps: 0 = no console line.
    """

    def __init__(self, max_steps: int, console: Sequence[str] = (), console_every_n_steps: int = 1) -> None:
        self._max_steps = max_steps
        self._console = tuple(console)
        self._console_every_n_steps = console_every_n_steps
        self._step_started = 0.0
        self._fit_started = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self._fit_started = self._step_started = time.monotonic()
        self._first_step = pl_module.rl_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reduce, log, print."""
        now = time.monotonic()
        batch.timings.setdefault("step", now - self._step_started)
        self._step_started = now
        local = {f"time/{name}_s": seconds for name, seconds in batch.timings.items()}
        local |= batch.metrics
        local["data/lost_count"] = float(len(batch.lost))
        metrics = merge(gather(local)) | dict(pl_module.step_metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=pl_module.rl_step)
        if trainer.is_global_zero and self._console_every_n_steps:
            step = pl_module.rl_step
            if step % self._console_every_n_steps == 0 or step >= self._max_steps:
                log.info(self._line(step, metrics, now))

    def _line(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        done = max(step - self._first_step, 1)
        remaining = (now - self._fit_started) / done * max(self._max_steps - step, 0)
        shown = "  ".join(f"{name.split('/')[-1]} {metrics[name]:.3f}" for name in self._console if name in metrics)
        seconds = metrics.get("time/step_s", 0.0)
        return f"step {step}/{self._max_steps}  {shown}  {seconds:.2f} s  ETA {format_seconds(remaining)}"


def format_seconds(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
