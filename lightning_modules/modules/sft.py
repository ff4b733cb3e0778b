"""Supervised fine-tuning on the answers of a `VideoRLDataModule`: the warm start before reinforcement learning.

Policy, layouts and update are those of GRPO; the responses are the records' answers instead of rollouts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datamodules.common.seeds import label_noise
from lightning_modules.modules.rl import GRPOLightningModule
from lightning_modules.state.export import export_policy
from rewards.base import Score
from rollout.types import Response, RolloutGroup

if TYPE_CHECKING:
    from datamodules.types import PreparedSample, Sample, StepBatch

log = logging.getLogger(__name__)


class SFTLightningModule(GRPOLightningModule):
    """Next-token training on target answers.

    Args:
        target_format: text of the target; `{answer}` is the record's answer.
        label_noise: share of samples whose target is drawn from the answers of the same data source instead of the
            own one. A warm start wants the form of answers without their truth.
        seed: of the label noise, a pure function of (seed, step, sample).
        export_to: folder of the Hugging Face model written at the end; None = not written.
        settings: everything `GRPOLightningModule` takes.
    """

    def __init__(
        self,
        target_format: str = "<answer>{answer}</answer>",
        label_noise: float = 0.0,
        seed: int = 0,
        export_to: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if "{answer}" not in target_format:
            raise ValueError(f"target_format={target_format!r} lacks the field {{answer}}")
        if not 0.0 <= label_noise <= 1.0:
            raise ValueError(f"label_noise={label_noise} is a share between 0 and 1")
        self.target_format = target_format
        self.label_noise = label_noise
        self.seed = seed
        self.export_to = export_to
        self._answers: dict[str, list[str]] | None = None

    def training_step(self, batch: StepBatch, batch_idx: int) -> None:
        """One step on target answers."""
        batch.groups = [self.target_group(index, prompt, batch.rl_step) for index, prompt in enumerate(batch.prompts)]
        batch.scores = [(Score(accuracy=1.0, format=1.0, total=1.0),) for _ in batch.groups]
        super().training_step(batch, batch_idx)
        self.step_metrics["sft/nll"] = self.step_metrics.get("losses/policy", 0.0)

    def target_group(self, index: int, prompt: PreparedSample, step: int) -> RolloutGroup:
        """The target of one prompt in the form of a rollout."""
        trainer: Any = self.trainer
        tokenizer = trainer.datamodule.processor.tokenizer
        text = self.target_format.format(answer=self._answer(prompt.sample, step))
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        response = Response(
            token_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop",
            text=text,
            seed=0,
        )
        return RolloutGroup(index, prompt, (response,))

    def _answer(self, sample: Sample, step: int) -> str:
        if not self.label_noise:
            return sample.answer
        share, choice = label_noise(self.seed, step, sample.uid)
        if share >= self.label_noise:
            return sample.answer
        pool = self._pool()[sample.data_source]
        return pool[choice % len(pool)]

    def _pool(self) -> dict[str, list[str]]:
        if self._answers is None:
            self._answers = {}
            trainer: Any = self.trainer
            for sample in trainer.datamodule.train_samples:
                self._answers.setdefault(sample.data_source, []).append(sample.answer)
        return self._answers

    def on_train_end(self) -> None:
        """Write the Hugging Face model, unless the user stopped the run."""
        trainer: Any = self.trainer
        stopped = any(getattr(callback, "stopped_by_user", False) for callback in trainer.callbacks)
        if self.export_to is None or stopped:
            return
        export_policy(self.policy, self.model_path, Path(self.export_to))
        log.info("exported the model to %s", self.export_to)
