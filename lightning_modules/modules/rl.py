"""The LightningModule of reinforcement learning: manual optimisation around `PolicyUpdater`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch

from lightning_modules.families.base import PARTS
from lightning_modules.layouts.base import Context
from lightning_modules.layouts.patchify import Patchifier
from lightning_modules.state.batch_dump import dump_batch
from lightning_modules.strategies.materialise import load_whole
from lightning_modules.update.dynamic_sampling import GroupFilter, next_round
from lightning_modules.update.optim import OptimizerSettings, build_optimizer, check_frozen_parts
from lightning_modules.update.settings import UpdateSettings
from lightning_modules.update.updater import PolicyUpdater

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.optim.lr_scheduler import LRScheduler

    from datamodules.types import StepBatch
    from lightning_modules.algorithms.base import Algorithm
    from lightning_modules.families.base import ModelFamily
    from lightning_modules.families.policy import PolicyModel
    from lightning_modules.layouts.base import Layout
    from lightning_modules.update.mismatch import MismatchGate

log = logging.getLogger(__name__)


class GRPOLightningModule(L.LightningModule):
    """Policy optimisation from rollouts that callbacks put into the `StepBatch`.

    `rl_step` counts steps, `rounds` the rollout batches they took (several per step under dynamic sampling),
    `weights_version` changes whenever the engine must be synchronised, `step_metrics` holds the last step's scalars,
    reduced over ranks.

    Args:
        model_path: Hugging Face folder.
        family: the model's architecture.
        algorithm: advantages and loss.
        layout: arrangement of responses in rows.
        optimizer: see `OptimizerSettings`.
        dtype: type of the parameters ("float32" or "bfloat16").
        gradient_checkpointing: recompute activations in backward.
        frozen_parts: parts that are not trained: vision_tower, merger, language_model.
        logprob_chunk: response tokens per chunk of the output projection.
        dump_dir: where batches with a non-finite loss are written; None = not written.
        mismatch_gate: bounds on engine-trainer disagreement; None = logged only.
        reference_offload: keep the reference model, where the algorithm needs one, in host memory between uses.
        **update: fields of `UpdateSettings`.
    """

    policy: PolicyModel
    """The trained model; made by `configure_model`."""

    forwards_to = UpdateSettings
    """What reads `**update`."""

    def __init__(
        self,
        model_path: str,
        family: ModelFamily,
        algorithm: Algorithm,
        layout: Layout,
        optimizer: OptimizerSettings | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        gradient_checkpointing: bool = False,
        frozen_parts: tuple[str, ...] | list[str] = (),
        logprob_chunk: int = 1024,
        dump_dir: str | None = None,
        mismatch_gate: MismatchGate | None = None,
        reference_offload: bool = False,
        **update: Any,
    ) -> None:
        super().__init__()
        if dtype not in ("float32", "bfloat16"):
            # AdamW's second moments and epsilon vanish in float16.
            raise ValueError(f"dtype={dtype!r}: choose float32 or bfloat16")
        if logprob_chunk < 1:
            raise ValueError(f"logprob_chunk={logprob_chunk} must be at least 1")
        check_frozen_parts(frozen_parts)
        self.automatic_optimization = False
        self.model_path = str(model_path)
        self.family = family
        self.algorithm = algorithm
        self.layout = layout
        self.optimizer_settings = optimizer or OptimizerSettings()
        self.update_settings = UpdateSettings(clip_norm=self.optimizer_settings.clip_norm, **update)
        self.parameter_dtype = getattr(torch, dtype)
        self.build_options: dict[str, Any] = {
            "gradient_checkpointing": gradient_checkpointing,
            "frozen_parts": tuple(frozen_parts),
            "logprob_chunk": logprob_chunk,
        }
        self.dump_dir = dump_dir
        self.mismatch_gate = mismatch_gate
        self.reference_offload = reference_offload
        self.filter = GroupFilter(algorithm) if algorithm.dynamic_sampling is not None else None
        self._unregistered: dict[str, Any] = {}  # the reference model must not enter state_dict or the optimizer
        self.rl_step = 0
        self.rounds = 0
        self._last_step: int | None = None
        self.weights_version = 0
        self.skipped_empty = 0
        self.skipped_nonfinite = 0
        self.step_metrics: dict[str, float] = {}

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether the engine must also produce one greedy response per prompt."""
        return self.algorithm.needs.greedy_baseline

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that sampling must never produce."""
        return self.family.open(self.model_path).banned_ids

    def configure_model(self) -> None:
        """Build the policy (and the reference, if needed) the way the strategy wants it; idempotent."""
        if hasattr(self, "policy"):
            return
        self.family.open(self.model_path)
        self.policy = self._build(self.build_options)
        if self.algorithm.needs.ref_logprobs:
            options = {**self.build_options, "frozen_parts": PARTS, "gradient_checkpointing": False}
            self._unregistered["reference"] = self._build({**options, "cpu_offload": self.reference_offload}).eval()

    def _build(self, options: dict[str, Any]) -> PolicyModel:
        build = getattr(getattr(self._trainer, "strategy", None), "build_policy", None)
        if build is not None:
            return build(self.family, self.model_path, self.parameter_dtype, **options)
        return load_whole(self.family, self.model_path, self.parameter_dtype, device=self.device, **options)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the trainable parts; the module steps the scheduler itself, per optimizer step."""
        optimizer, scheduler = build_optimizer(self.policy, self.family, self.optimizer_settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def transfer_batch_to_device(self, batch: StepBatch, device: torch.device, dataloader_idx: int) -> StepBatch:
        """Leave the batch on the host: tensors are built per micro-batch."""
        return batch

    def on_fit_start(self) -> None:
        """Build what updates, and check it, before the first rollout is paid for; order enough rounds."""
        self.updater()
        trainer: Any = self.trainer
        data = trainer.datamodule
        if self.filter is None or data is None:
            return
        # A checkpoint is loaded by now. The loader yields rounds, of which a step may take several.
        self._last_step = data.max_steps if self._last_step is None else self._last_step
        data.start_step = self.rounds
        data.max_steps = self.rounds + (self._last_step - self.rl_step) * self.filter.settings.max_rounds

    def _context(self) -> Context:
        if "patchify" not in self._unregistered:
            self._unregistered["patchify"] = Patchifier.from_path(self.model_path, self.device)
        return Context(self.family, self._unregistered["patchify"], self.device)

    def updater(self) -> PolicyUpdater:
        """The object that runs updates; made once, after `configure_model`."""
        if "updater" not in self._unregistered:
            strategy = getattr(self._trainer, "strategy", None)
            self._unregistered["updater"] = PolicyUpdater(
                self.policy,
                self.algorithm,
                self.layout,
                self._context(),
                self.update_settings,
                backward=self.manual_backward if self._trainer is not None else torch.Tensor.backward,
                sync_gradients=getattr(strategy, "sync_gradients", None),
                reference=self._unregistered.get("reference"),
                gate=self.mismatch_gate,
                park_reference=self.reference_offload and not getattr(strategy, "shards_policy", False),
            )
        return self._unregistered["updater"]

    def training_step(self, batch: StepBatch, batch_idx: int) -> None:
        """One RL step on scored rollouts, over as many rounds as dynamic sampling asks for."""
        rounds = 1
        if self.filter is not None:
            rounds = self.filter.fill(batch, lambda limit: next_round(self.trainer, self, batch_idx, limit))
            batch.rl_step = self.rl_step  # the loader counted rounds
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()  # one of each
        self.update(batch, cast("torch.optim.Optimizer", optimizer), cast("LRScheduler | None", scheduler))
        self.rounds += rounds
        if self._last_step is not None and self.rl_step >= self._last_step:
            self.trainer.should_stop = True

    def update(
        self,
        batch: StepBatch,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """`training_step` without a Trainer: update the policy, count, reduce metrics.

        Raises:
            RuntimeError: the loss or gradient was not finite, or engine and trainer disagreed, too often in a row.
        """
        updater = self.updater()
        self.policy.train()
        updates, bag = updater.run(batch, optimizer, scheduler)
        self.step_metrics = bag.reduce()
        self._after_update()
        self.skipped_empty += int(self.step_metrics.get("train/skipped_empty", 0))
        if self.step_metrics.get("train/skipped_nonfinite"):
            self.skipped_nonfinite += 1
            self._handle_nonfinite(batch, updater.bad_updates_in_a_row)
        self.step_metrics["train/skipped_empty_total"] = float(self.skipped_empty)
        self.step_metrics["train/skipped_nonfinite_total"] = float(self.skipped_nonfinite)
        self.rl_step += 1
        # A refused engine gets the weights once more, although they are the same.
        self.weights_version += int(updates > 0 or updater.rejected)

    def _after_update(self) -> None:
        """Let what watches the step look at its reduced metrics, alike on every rank."""
        kl = self.algorithm.kl
        if kl is not None:
            responses = self.step_metrics.get("groups/responses", 0.0)
            kl.adapt(self.step_metrics.get("policy/kl_ref", 0.0), responses)
            self.step_metrics["policy/kl_beta"] = kl.beta

    def _handle_nonfinite(self, batch: StepBatch, in_a_row: int) -> None:
        where = "not written (dump_dir is not set)"
        if self.dump_dir is not None:
            rank = self.global_rank if self._trainer is not None else 0
            where = str(dump_batch(batch, Path(self.dump_dir) / f"step{self.rl_step:06d}_rank{rank}.batch"))
        log.warning("Step %d skipped, batch for replay: %s", self.rl_step, where)
        if in_a_row >= self.update_settings.max_bad_updates:
            raise RuntimeError(
                f"loss or gradient was not finite in {in_a_row} updates in a row, the last in step {self.rl_step}; "
                f"batch for replay: {where}. Lower the learning rate or look at the dumped batch"
            )

    def engine_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (checkpoint name, full tensor), one parameter at a time; every rank iterates to the end."""
        yield from self.policy.checkpoint_weights()

    def rl_state(self) -> dict[str, Any]:
        """Counters and algorithm state for a resume; tensors and plain values."""
        return {
            "rl_step": self.rl_step,
            "rounds": self.rounds,
            "weights_version": self.weights_version,
            "skipped_empty": self.skipped_empty,
            "skipped_nonfinite": self.skipped_nonfinite,
            "bad_updates_in_a_row": self.updater().bad_updates_in_a_row,
            "mismatch_in_a_row": self.mismatch_gate.violations_in_a_row if self.mismatch_gate is not None else 0,
            "algorithm": self.algorithm.state(),
        }

    def load_rl_state(self, state: dict[str, Any]) -> None:
        """Restore what `rl_state` returned."""
        for name in ("rl_step", "weights_version", "skipped_empty", "skipped_nonfinite"):
            setattr(self, name, int(state[name]))
        self.rounds = int(state.get("rounds", state["rl_step"]))  # one per step where it was not counted
        self.updater().bad_updates_in_a_row = int(state["bad_updates_in_a_row"])
        if self.mismatch_gate is not None:
            self.mismatch_gate.violations_in_a_row = int(state["mismatch_in_a_row"])
        self.algorithm.load_state(state["algorithm"])
