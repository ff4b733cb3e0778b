"""One rank of a two-rank fit with the reward callback; rank 1's first response hangs its scorer. Prints its scores."""

from __future__ import annotations

import json
import os
import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from test_rewards_callback import Recorder, ScriptedEngine, group, router

from datamodules.types import StepBatch
from rewards.callback import RewardCallback


def main() -> None:
    rank = int(os.environ["RANK"])
    first = ["x", "y"] if rank == 0 else ["hang", "x"]
    groups = [group(0, "slow", "x", first), group(1, "boolean", "yes", ["yes", "no"])]
    module = Recorder()
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ScriptedEngine(groups, [1, 0]), RewardCallback(router())],
    )
    batches = [StepBatch(prompts=[]), StepBatch(prompts=[])]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    scores = [[(score.accuracy, score.status) for score in row] for row in module.seen.scores]
    masked = module.seen.metrics["reward/masked_groups_count"]
    # One write per line: the ranks share standard output.
    sys.stdout.write("RESULT " + json.dumps([rank, scores, masked]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
