"""Held-out evaluation during training: same engine, same weights, same scorer, all ranks in lock-step."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch

from datamodules.common.distributed import gather
from datamodules.common.files import write_json
from eval.heldout import EvalRecord, complete, evaluate_batches, summarise
from eval.slices import slice_metrics

if TYPE_CHECKING:
    from eval.benchmarks.types import Summary
    from eval.slices import BenchmarkSlices
    from rewards.router import RewardRouter

log = logging.getLogger(__name__)


class EvaluationCallback(L.Callback):
    """Answers the datamodule's held-out split greedily every N steps, scores it and logs `val/...`.

    Finds the engine callback among the trainer's callbacks and generates through its `generate_fn`. Every rank
    evaluates its shard; records are gathered, so `last_results` is the same everywhere. Rank 0 writes
    `<run_dir>/evaluation/step_XXXXXX.json` (metrics and one record per item).

    Args:
        router: the scorer; give it the same configuration as the reward callback's.
        every_n_steps: 0 = only at start and end.
        at_start: evaluate before the first step (not after a resume).
        at_end: evaluate after the last step.
        max_steps: number of the last step.
        run_dir: the run's folder; None = write no file.
        max_tokens: longest response; None = as in training.
        temperature: 0 = greedy.
        seed: of the responses when the temperature is not 0.
        timeout: seconds to wait for outstanding scores of a batch.
        slices: benchmarks asked at the same times; None = only the held-out split.
        best_metric: metric whose best step is remembered in `<run_dir>/evaluation/best.json`, for instance
            `eval/mean` or `val/accuracy_mean`; the checkpoint callback keeps that step's checkpoint. None = none.
            What training starts from has no checkpoint and is not a candidate; its value is remembered beside the best.
    """

    def __init__(
        self,
        router: RewardRouter,
        every_n_steps: int = 50,
        at_start: bool = True,
        at_end: bool = True,
        max_steps: int | None = None,
        run_dir: str | Path | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        timeout: float = 300.0,
        slices: BenchmarkSlices | None = None,
        best_metric: str | None = None,
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"every_n_steps={every_n_steps} is negative; use 0 for start and end only")
        if at_end and max_steps is None:
            raise ValueError("at_end needs max_steps, the number of the last step")
        self.router = router
        self._every_n_steps = every_n_steps
        self._at_start, self._at_end, self._max_steps = at_start, at_end, max_steps
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._max_tokens, self._temperature, self._seed = max_tokens, temperature, seed
        self._timeout = timeout
        self._slices, self._best_metric = slices, best_metric
        self.best: dict[str, Any] | None = None
        """{"step", "metric", "value", "start"} of the best evaluation so far; part of the checkpoint."""
        self._start: float | None = None
        self._has_best_metric = False
        self.last_results: dict[str, Any] | None = None
        """{"step", "metrics", "records"} of the latest evaluation."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the benchmarks' files: what is wrong with them must not end a run in its middle."""
        if self._slices is not None:
            self._slices.load()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate what training starts from."""
        if self._at_start and _step(pl_module) == 0:
            self.evaluate(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate when it is time; the step counter is that of finished steps."""
        step = _step(pl_module)
        last = self._at_end and step == self._max_steps
        if last or (self._every_n_steps and step % self._every_n_steps == 0):
            self.evaluate(trainer, pl_module)

    def evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Evaluate now; a collective. Returns the metrics, equal on every rank, empty without a held-out split."""
        started, step = time.monotonic(), _step(pl_module)
        parts = cast(Any, trainer)  # Lightning sets these attributes without declaring them
        datamodule = parts.datamodule
        samples = {sample.uid: sample for sample in datamodule.val_samples}
        if not samples and self._slices is None:
            return {}
        engine = next((c for c in parts.callbacks if callable(getattr(c, "generate_fn", None))), None)
        if engine is None:
            raise RuntimeError(
                "EvaluationCallback found no callback with an engine (generate_fn); add the engine callback to the "
                f"trainer's callbacks (there are: {', '.join(type(c).__name__ for c in parts.callbacks)})"
            )
        sampling = dataclasses.replace(engine.sampling, n=1, temperature=self._temperature, top_p=1.0, top_k=-1)
        if self._max_tokens is not None:
            sampling = dataclasses.replace(sampling, max_tokens=self._max_tokens)
        # Loaders draw from torch's generator; training must go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]), engine.session():
            own = evaluate_batches(
                datamodule.val_dataloader(),
                samples,
                engine.generate_fn,
                self.router,
                sampling,
                seed=self._seed,
                timeout=self._timeout,
            )
            sliced = []
            if self._slices is not None:
                sliced = self._slices.evaluate(
                    engine.generate_fn,
                    self.router,
                    sampling,
                    rank=trainer.global_rank,
                    world=trainer.world_size,
                    gather=_everyones,
                    seed=self._seed,
                    timeout_s=self._timeout,
                )
        records = complete(_everyones(own), list(samples.values()))
        metrics = summarise(records) | slice_metrics(sliced) | {"val/seconds": time.monotonic() - started}
        self.last_results = {"step": step, "metrics": metrics, "records": records, "slices": sliced}
        self._remember_best(step, metrics)
        if trainer.is_global_zero:
            self._publish(trainer, step, metrics, records, sliced)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation so far."""
        return dict(self.best or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the best evaluation of the run so far."""
        self.best = dict(state_dict) or None

    def _remember_best(self, step: int, metrics: dict[str, float]) -> None:
        if self._best_metric is None:
            return
        if self._best_metric not in metrics:
            message = f"best_metric={self._best_metric} is not among the metrics: {', '.join(sorted(metrics))}"
            if not self._has_best_metric:
                raise ValueError(message)
            log.warning("evaluation after step %d does not count: %s", step, message)  # a judge that is away
            return
        self._has_best_metric = True
        value = metrics[self._best_metric]
        if step == 0:
            self._start = value
        # A later step must be better, not equal: the earliest of equals is kept.
        elif self.best is None or value > self.best["value"]:
            start = self._start if self.best is None else self.best["start"]
            self.best = {"step": step, "metric": self._best_metric, "value": value, "start": start}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the scorer's processes."""
        self.router.close()

    def _publish(
        self,
        trainer: L.Trainer,
        step: int,
        metrics: dict[str, float],
        records: list[EvalRecord],
        sliced: list[tuple[Summary, list[dict[str, Any]]]],
    ) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        if records:
            accuracy = metrics.get("val/accuracy_mean")
            log.info(
                "evaluation after step %d: accuracy %s over %d items (%d failed, %d unparsed), %.1f s",
                step,
                "not judged" if accuracy is None else f"{accuracy:.3f}",
                len(records),
                metrics["val/failed"],
                metrics["val/unparsed"],
                metrics["val/seconds"],
            )
        for summary, _ in sliced:
            name, value = next(iter(summary.headline.items()))
            shown = "not judged" if value is None else f"{value:.1f}"
            log.info("evaluation after step %d: %s %s %s (%s)", step, summary.benchmark, name, shown, summary.counts)
        if self._run_dir is None:
            return
        folder = self._run_dir / "evaluation"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:06d}.json"
        slices = {summary.benchmark: rows for summary, rows in sliced}
        content = {"step": step, "metrics": metrics, "records": [dataclasses.asdict(record) for record in records]}
        write_json(path, content | ({"slices": slices} if slices else {}))
        if self.best is not None:
            write_json(folder / "best.json", self.best)


def _step(pl_module: L.LightningModule) -> int:
    """Number of the training module's finished steps."""
    return cast(Any, pl_module).rl_step


def _everyones(records: list[Any]) -> list[Any]:
    """All ranks' records on every rank."""
    return [record for part in gather(records) for record in part]
