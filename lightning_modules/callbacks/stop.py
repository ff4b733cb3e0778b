"""Stop at a step boundary, on every rank at the same one, when somebody asks; at once when asked twice."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import lightning as L

from lightning_modules.state.stop_flag import was_interrupted

log = logging.getLogger(__name__)


class StopCallback(L.Callback):
    """Turn SIGINT and SIGTERM into an agreed stop after the current step.

    The handlers only set a flag: a collective inside a signal handler can meet another one in the main thread and
    hang. The flag is reduced over ranks at each step boundary; the checkpoint callback, placed later, then saves.
    Place it first, so that a request during start-up is honoured before the first step.

    Args:
        watchdog_s: seconds after the first request at which the process ends even without reaching a boundary.
        max_steps: the RL step after which training ends.
        max_seconds: the run also ends, regularly, at the first step boundary after this time; None = no limit.
    """

    def __init__(self, max_steps: int, watchdog_s: float = 900.0, max_seconds: float | None = None) -> None:
        self._max_steps = max_steps
        self._watchdog_s = watchdog_s
        self._max_seconds = max_seconds
        self._started = time.monotonic()
        self._requested = False
        self._previous: dict[int, Any] = {}
        self.stopped_by_user = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the handlers, and keep Lightning from installing its own, which runs a collective inside."""
        if threading.current_thread() is not threading.main_thread():
            return  # handlers belong to the main thread
        trainer._signal_connector.register_signal_handlers = lambda: None
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._on_signal)
        self._requested |= was_interrupted()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock; leave at once when somebody asked to stop during start-up."""
        self._started = time.monotonic()
        if trainer.strategy.reduce_boolean_decision(self._requested, all=False):
            self.stopped_by_user = True
            trainer.should_stop = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            os._exit(130)  # the user insists; the last periodic checkpoint is intact
        self._requested = True
        os.write(2, b"\nstopping after this step; once more ends at once\n")
        watchdog = threading.Timer(self._watchdog_s, lambda: os._exit(130))
        watchdog.daemon = True
        watchdog.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Agree on stopping."""
        if trainer.strategy.reduce_boolean_decision(self._requested, all=False):
            self.stopped_by_user = pl_module.rl_step < self._max_steps
            trainer.should_stop = True
            return
        over = self._max_seconds is not None and time.monotonic() - self._started > self._max_seconds
        if self._max_seconds is not None and trainer.strategy.reduce_boolean_decision(over, all=False):
            trainer.should_stop = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the handlers back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
