"""Order and content of hybrid groups, thresholds, the ratio; weightings by hand."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from offline_helpers import answer, prompt, ready, requests, sampling, scored
from policy_helpers import load_processor

from datamodules.types import StepBatch
from lightning_modules.algorithms.base import TokenBatch
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.luffy import Luffy
from lightning_modules.algorithms.weighting import AsOnPolicy, ClippedRatio, Shaped
from lightning_modules.offline.mix import MixCallback
from lightning_modules.offline.schedule import Share
from rewards.router import RewardRouter
from rewards.tasks.ocr import OCR
from rollout.types import RolloutGroup

YES = "<answer>yes</answer>"


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def step(callback, processor, batch, texts, accuracies):
    """One step of the engine and reward callbacks' protocol with scripted answers; returns the ids asked for."""
    spec = callback.sampling
    callback.begin(batch, spec)
    asked = callback.edit_requests(requests(batch, spec))
    batch.groups, batch.scores = [], []
    for index, sample in enumerate(batch.prompts):
        own = [r for r in asked if r.request_id.split(":")[1] == str(index)]
        group = RolloutGroup(index, sample, tuple(answer(processor, texts) for _ in own))
        group = callback.edit_group(group)
        batch.groups.append(group)
        right = [1.0 if r.offline else accuracies[index] for r in group.responses]
        batch.scores.append(tuple(map(scored, right)))
    callback.on_train_batch_start(None, None, batch, 0)
    return [r.request_id for r in asked]


def test_without_a_threshold_n_minus_one_answers_and_the_trajectory(processor):
    callback = ready(MixCallback(), processor)
    batch = StepBatch([prompt(processor, "a:0", YES), prompt(processor, "a:1")], rl_step=5)
    asked = step(callback, processor, batch, "no", [0.0, 0.0])
    assert asked == ["5:0:0", "5:0:1", "5:0:2", "5:1:0", "5:1:1", "5:1:2", "5:1:3"]
    assert [[r.offline for r in g.responses] for g in batch.groups] == [[False] * 3 + [True], [False] * 4]
    assert batch.groups[0].responses[-1].text == YES
    assert batch.metrics["offline/injected_count"] == 1
    assert batch.metrics["offline/usable_count"] == 1


def test_with_a_threshold_n_answers_then_the_last_of_failing_groups_is_replaced(processor):
    callback = ready(MixCallback(group_threshold=0.5), processor)
    samples = [prompt(processor, f"a:{i}", YES) for i in range(3)]
    batch = StepBatch(samples, rl_step=1)
    asked = step(callback, processor, batch, "no", [0.0, 0.5, 1.0])
    assert len(asked) == 12, "n answers for every prompt, before anything is decided"
    assert [[r.offline for r in g.responses] for g in batch.groups] == [
        [False] * 3 + [True],
        [False] * 4,  # 0.5 is not below 0.5
        [False] * 4,
    ]
    # The trajectory's own score, by the same scorer.
    assert [s.total for s in batch.scores[0]] == [0.0, 0.0, 0.0, 1.0]
    assert batch.metrics["offline/failing_groups_count"] == 1


def test_groups_without_a_verdict_are_left_alone(processor):
    callback = ready(MixCallback(group_threshold=0.5), processor)
    batch = StepBatch([prompt(processor, "a:0", YES)])
    callback.begin(batch, callback.sampling)
    group = RolloutGroup(0, batch.prompts[0], tuple(answer(processor, "no") for _ in range(4)))
    batch.groups, batch.scores = [group], [(scored(0.0), scored(0.0), scored(0.0), scored(0.0, "timeout"))]
    callback.on_train_batch_start(None, None, batch, 0)
    assert batch.groups == [group]


def test_trajectories_below_the_minimal_score_are_rejected(processor):
    callback = ready(MixCallback(min_score=0.5), processor)
    wrong = prompt(processor, "a:0", "<answer>no</answer>")  # the gold answer is yes
    batch = StepBatch([wrong, prompt(processor, "a:1", YES)])
    asked = step(callback, processor, batch, "no", [0.0, 0.0])
    assert len(asked) == 4 + 3
    assert callback.reader.rejected["a:0"] == ("score", "it scores 0.000, min_score is 0.5")
    assert batch.metrics["offline/rejected_count"] == 1
    # A function of the step's prompts: the same after a resume and on any number of ranks.
    again = StepBatch([wrong], rl_step=7)
    step(callback, processor, again, "no", [0.0])
    other = StepBatch([prompt(processor, "a:2", YES)], rl_step=8)
    step(callback, processor, other, "no", [0.0])
    assert [b.metrics["offline/rejected_count"] for b in (again, other)] == [1, 0]


def test_a_trajectory_without_a_verdict_does_not_mask_its_group(processor):
    class Broken(OCR):
        def judge(self, query, answer):
            raise ValueError("the gold answer cannot be read")

    callback = ready(MixCallback(), processor)
    callback._router = RewardRouter(routes={"ocr": Broken()})
    batch = StepBatch([prompt(processor, "a:0", YES)])
    assert len(step(callback, processor, batch, "no", [0.0])) == 4, "n own answers"
    assert callback.reader.rejected["a:0"] == ("score", "error: the gold answer cannot be read")


def test_scorers_that_hang_cost_one_waiting_time_together(processor):
    class Hanging(OCR):
        lane = "thread"

        def judge(self, query, answer):
            released.wait()
            return super().judge(query, answer)

    released = threading.Event()
    callback = ready(MixCallback(), processor)
    callback._router, callback._score_timeout = RewardRouter(routes={"ocr": Hanging()}), 0.5
    batch = StepBatch([prompt(processor, f"a:{i}", YES) for i in range(150)])
    began = time.monotonic()
    try:
        callback.begin(batch, callback.sampling)
    finally:
        released.set()
        callback._router.close()
    assert time.monotonic() - began < 60, "not 0.5 s for each of the 150"
    assert {reason for _, reason in callback.reader.rejected.values()} == {"timeout: no verdict within 0.5 s"}


def test_the_ratio_chooses_that_share_of_prompts_and_moves(processor):
    callback = ready(MixCallback(ratio=Share(1.0, end=0.0, steps=10)), processor)
    samples = [prompt(processor, f"a:{i}", YES) for i in range(40)]
    chosen = []
    for number in (0, 5, 10):
        batch = StepBatch(list(samples), rl_step=number)
        callback.begin(batch, callback.sampling)
        chosen.append(len(callback._chosen))
        assert batch.metrics["offline/mix_ratio"] == 1.0 - number / 10
    assert chosen[0] == 40
    assert 10 <= chosen[1] <= 30
    assert chosen[2] == 0
    # A function of (seed, step, sample): other neighbours, as on other ranks, change nothing.
    batch = StepBatch(samples[20:], rl_step=5)
    whole = StepBatch(list(samples), rl_step=5)
    callback.begin(whole, callback.sampling)
    all_chosen = {samples[i].uid for i in callback._chosen}
    callback.begin(batch, callback.sampling)
    assert {batch.prompts[i].uid for i in callback._chosen} == {s.uid for s in samples[20:]} & all_chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_threshold": 1.5}, r"group_threshold=1\.5"),
        ({"min_score": -0.1}, r"min_score=-0\.1"),
        ({"ratio": 1.2}, r"1\.2 is out of range"),
        ({"ratio": None}, r"start=None is out of range"),
        ({"group_threshold": "high"}, r"group_threshold=high is out of range"),
        ({"min_score": float("nan")}, r"min_score=nan is out of range"),
    ],
)
def test_settings_out_of_range_are_said(options, message):
    with pytest.raises(ValueError, match=message):
        MixCallback(**options)


def test_one_answer_per_prompt_leaves_no_room(processor):
    with pytest.raises(ValueError, match=r"n=1"):
        MixCallback().check(sampling(processor, n=1))


def token_batch(logprobs, rollout, off):
    values = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    index = torch.zeros(len(logprobs), dtype=torch.int64)
    advantages = torch.full((len(logprobs),), 2.0, dtype=torch.float64)
    behaviour = torch.tensor(rollout, dtype=torch.float64)
    return TokenBatch(
        values, values.detach(), advantages, index, torch.bincount(index), rollout_logprobs=behaviour,
        off_policy=torch.tensor(off),
    )  # fmt: skip


def test_weightings_by_hand():
    log = np.log
    batch = token_batch([log(0.1), log(0.5), log(0.1), log(0.9)], [log(0.1), log(0.25), log(0.4), np.nan], [0, 1, 1, 0])
    batch = dataclasses.replace(batch, off_policy=torch.tensor([False, True, True, False]))
    plain = GRPO().token_loss(batch)
    assert plain.loss.tolist() == [-2.0] * 4, "on policy the ratio is 1"
    assert AsOnPolicy()(batch, plain).loss.tolist() == [-2.0] * 4
    assert AsOnPolicy(weight=0.0)(batch, plain).loss.tolist() == [-2.0, 0.0, 0.0, -2.0]
    # Ratios 0.5 / 0.25 = 2, clipped at 1.2, and 0.1 / 0.4 = 0.25, not clipped for a positive advantage.
    clipped = ClippedRatio()(batch, plain)
    torch.testing.assert_close(clipped.loss.detach(), torch.tensor([-2.0, -2.4, -0.5, -2.0], dtype=torch.float64))
    # p / (p + 0.1): 0.5 / 0.6 and 0.1 / 0.2.
    shaped = Shaped(gamma=0.1)(batch, plain)
    want = torch.tensor([-2.0, -2 * 0.5 / 0.6, -1.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(shaped.loss.detach(), want)
    # f'(p) dp: f' = gamma / (p + gamma)^2 and dp / dlog p = p (the paper's equation of the shaped gradient).
    (gradient,) = torch.autograd.grad(shaped.loss.sum(), batch.logprobs, retain_graph=True)
    want = [-2.0, -2 * 0.1 / 0.6**2 * 0.5, -2 * 0.1 / 0.2**2 * 0.1, -2.0]
    torch.testing.assert_close(gradient, torch.tensor(want, dtype=torch.float64))
    # Clip diagnostics describe the tokens that were clipped: without the mask the second token's would be 1.
    old = dataclasses.replace(batch, old_logprobs=batch.old_logprobs - 1.0)
    assert GRPO().token_loss(old).diagnostics["clip_high"].tolist() == [1, 1, 1, 1]
    assert Shaped()(old, GRPO().token_loss(old)).diagnostics["clip_high"].tolist() == [1, 0, 0, 1]
    assert AsOnPolicy()(old, GRPO().token_loss(old)).diagnostics["clip_high"].tolist() == [1, 1, 1, 1]
    assert AsOnPolicy()(batch, Luffy().token_loss(batch)).diagnostics["off_policy"].tolist() == [0, 1, 1, 0]
    for result in (clipped, shaped):
        (gradient,) = torch.autograd.grad(result.loss.sum(), batch.logprobs, retain_graph=True)
        assert torch.isfinite(gradient).all(), "unknown log-probs of the policy's own tokens are not touched"
        assert gradient[0] == -2.0
    with pytest.raises(ValueError, match="negative"):
        Shaped(weight=-1.0)
