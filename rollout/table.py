"""A few responses of every step in a file, for people: what does the policy say, and what is it rewarded for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

if TYPE_CHECKING:
    from datamodules.types import StepBatch
    from rollout.types import Response


class RolloutTableCallback(L.Callback):
    """Rank 0 writes `<run_dir>/rollouts/step_XXXXXX.jsonl`: one line per response of its first groups.

    Args:
        run_dir: the run's folder.
        num_groups: groups per step that are written.
        every_n_steps: 0 = never.
    """

    def __init__(self, run_dir: str | Path, num_groups: int = 2, every_n_steps: int = 1) -> None:
        if num_groups < 1 or every_n_steps < 0:
            raise ValueError(f"num_groups={num_groups} must be positive and every_n_steps={every_n_steps} not negative")
        self._folder = Path(run_dir) / "rollouts"
        self._num_groups = num_groups
        self._every_n_steps = every_n_steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Write the step's file; the same step again (after a resume) replaces it."""
        if not trainer.is_global_zero or not self._every_n_steps or batch.rl_step % self._every_n_steps:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in table_rows(batch, self._num_groups)]
        path = self._folder / f"step_{batch.rl_step:06d}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def table_rows(batch: StepBatch, num_groups: int) -> list[dict[str, Any]]:
    """One plain dictionary per response of the first `num_groups` groups; scores where there are any."""
    rows = []
    for index, group in enumerate(batch.groups[:num_groups]):
        sample = group.prompt.sample
        scores = batch.scores[index] if index < len(batch.scores) else ()
        for k, response in enumerate(group.responses):
            row: dict[str, Any] = {
                "step": batch.rl_step,
                "uid": group.uid,
                "problem_type": sample.problem_type,
                "problem": sample.problem,
                "answer": sample.answer,
                "k": k,
                "response": response.text,
                "tokens": len(response.token_ids),
                "finish_reason": response.finish_reason,
                "offline_tokens": int(response.offline_mask.sum()),
                "mean_logprob": mean_logprob(response),
                "seed": response.seed,
            }
            if k < len(scores):
                score = scores[k]
                row |= {"accuracy": score.accuracy, "format": score.format, "total": score.total}
                row |= {"status": score.status, "reason": score.reason}
            rows.append(row)
    return rows


def mean_logprob(response: Response) -> float | None:
    """Mean log-prob of the tokens that the policy sampled; None where there are none."""
    own = response.logprobs[~response.offline_mask]
    return float(own.mean()) if len(own) else None
