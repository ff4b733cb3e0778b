"""The reward callback inside a real Lightning fit: scores arrive aligned, overlapped, masked and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from rewards_helpers import Scripted
from waiting import file_exists

from datamodules.types import PreparedSample, Sample, StepBatch
from rewards.callback import RewardCallback
from rewards.router import RewardRouter
from rewards.tasks.boolean import Boolean
from rewards.tasks.multiple_choice import MultipleChoice
from rollout.types import Response, RolloutGroup


def response(text: str) -> Response:
    return Response(np.arange(len(text), dtype=np.int32), np.zeros(len(text), np.float32), "stop", text, 0)


def group(index: int, kind: str, answer: str, texts: list[str], options=(), greedy=None) -> RolloutGroup:
    sample = Sample(f"s:{index}", "Question?", answer, kind, "text", options=tuple(options), extra={"mode": "ignored"})
    prompt = PreparedSample(sample, "", (1,), (1,))
    baseline = response(greedy) if greedy is not None else None
    return RolloutGroup(index, prompt, tuple(map(response, texts)), baseline)


class ScriptedEngine(L.Callback):
    """Publishes prepared groups in the order in which a real engine would finish them.

    With `until_file` it still generates its last group until that file is there.
    """

    def __init__(self, groups: list[RolloutGroup], finish_order: list[int], until_file: Path | None = None) -> None:
        self.groups, self.order, self.until_file, self.sinks = groups, finish_order, until_file, []

    def subscribe(self, sink) -> None:
        self.sinks.append(sink)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        for index in self.order:
            if self.until_file and index == self.order[-1]:
                file_exists(self.until_file)
            for sink in self.sinks:
                sink.put(self.groups[index])
        batch.groups = list(self.groups)


class Recorder(L.LightningModule):
    """Keeps the batch that reaches `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: StepBatch | None = None

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, batch, batch_idx):
        self.seen = batch
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(callbacks: list[L.Callback], num_prompts: int) -> StepBatch:
    module = Recorder()
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader([StepBatch(prompts=[])], batch_size=None)
    trainer.fit(module, loader)
    assert module.seen is not None
    return module.seen


def router() -> RewardRouter:
    return RewardRouter({"multiple choice": MultipleChoice(), "boolean": Boolean(), "slow": Scripted()}, workers=2)


def test_scores_are_aligned_whatever_the_finish_order() -> None:
    groups = [
        group(0, "multiple choice", "B", ["<answer>B</answer>", "<answer>A</answer>"], ["A. x", "B. y"], greedy="B"),
        group(1, "boolean", "yes", ["yes", "<answer>no</answer>", "who knows"]),
    ]
    batch = fit([ScriptedEngine(groups, [1, 0]), RewardCallback(router())], 2)
    assert [[s.accuracy for s in scores] for scores in batch.scores] == [[1.0, 0.0], [1.0, 0.0, 0.0]]
    assert [[s.status for s in scores] for scores in batch.scores] == [["ok", "ok"], ["ok", "ok", "unparsable"]]
    assert [[round(s.total, 6) for s in scores] for scores in batch.scores] == [[1.0, 0.1], [0.9, 0.1, 0.0]]
    assert batch.greedy_scores[0].total == pytest.approx(0.9)
    assert batch.greedy_scores[1] is None
    assert batch.metrics["reward/multiple_choice/accuracy_mean"] == 0.5
    assert batch.metrics["reward/boolean/accuracy_mean"] == pytest.approx(1 / 3)
    assert batch.metrics["reward/accuracy_mean"] == pytest.approx(2 / 5)
    assert batch.metrics["reward/status/unparsable_count"] == 1
    assert batch.metrics["reward/masked_groups_count"] == 0


def test_scoring_overlaps_with_generation_and_a_hang_masks_only_its_group(tmp_path: Path) -> None:
    mark = f"mark {tmp_path}/scored"
    groups = [
        group(0, "slow", mark, [mark, "something else"]),
        group(1, "slow", "x", ["hang", "x"]),
        group(2, "boolean", "no", ["no", "yes"]),
    ]
    batch = fit([ScriptedEngine(groups, [0, 1, 2], until_file=tmp_path / "scored"), RewardCallback(router())], 3)
    assert [[s.accuracy for s in scores] for scores in batch.scores] == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    assert batch.scores[1][0].status == "timeout"
    assert [all(s.has_verdict for s in scores) for scores in batch.scores] == [True, False, True]
    assert batch.metrics["reward/status/timeout_count"] == 1
    assert batch.metrics["reward/masked_groups_count"] == 1
    assert batch.timings["score_busy"] >= batch.timings["score"] * (1 - batch.timings["score_overlap"]) >= 0


def test_a_wrong_place_in_the_list_is_an_error() -> None:
    engine, callback = ScriptedEngine([], []), RewardCallback(router())
    with pytest.raises(RuntimeError, match="stands before ScriptedEngine"):
        fit([callback, engine], 0)
    with pytest.raises(RuntimeError, match="no callback that publishes"):
        fit([RewardCallback(router())], 0)


def test_a_group_that_was_never_published_is_an_error() -> None:
    engine = ScriptedEngine([group(0, "boolean", "yes", ["yes"])], [])
    with pytest.raises(RuntimeError, match="never published"):
        fit([engine, RewardCallback(router())], 1)


@pytest.mark.slow
def test_each_of_two_ranks_scores_its_own_groups() -> None:
    """A scorer that hangs on one rank masks that rank's group and leaves the other rank alone."""
    worker = Path(__file__).parent / "workers" / "reward_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", str(worker)]
    paths = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    results = sorted(json.loads(line.split("RESULT ")[1]) for line in run.stdout.splitlines() if "RESULT " in line)
    boolean = [[1.0, "ok"], [0.0, "ok"]]
    assert results == [
        [0, [[[1.0, "ok"], [0.0, "ok"]], boolean], 0.0],
        [1, [[[0.0, "timeout"], [1.0, "ok"]], boolean], 1.0],
    ]
