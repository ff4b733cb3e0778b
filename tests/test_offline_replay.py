"""The replay buffer: bounds, what is kept and brought back, checkpoints, another tokenizer."""

from __future__ import annotations

import dataclasses
import io
import types

import pytest
import torch
from conftest import TINY_CORPUS
from offline_helpers import answer, prompt, ready, scored
from policy_helpers import load_processor

from datamodules.demo.tiny_model import train_tokenizer
from datamodules.types import StepBatch
from lightning_modules.algorithms.weighting import ClippedRatio
from lightning_modules.offline.replay import Experience, ReplayBuffer, ReplayCallback, tokenizer_fingerprint
from rollout.types import RolloutGroup


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def callback_for(processor, **options) -> ReplayCallback:
    callback = ready(ReplayCallback(**options), processor)
    callback.fingerprint = tokenizer_fingerprint(processor.tokenizer)
    return callback


def step(callback, processor, number, rows):
    """One step: {uid: accuracies of its answers}."""
    samples = [prompt(processor, uid) for uid in rows]
    batch = StepBatch(samples, rl_step=number)
    callback.begin(batch, callback.sampling)
    for index, (uid, accuracies) in enumerate(rows.items()):
        texts = [f"<answer>{number} {uid} {k}</answer>" for k in range(len(accuracies))]
        group = RolloutGroup(index, samples[index], tuple(answer(processor, text) for text in texts))
        batch.groups.append(callback.edit_group(group))
        batch.scores.append(tuple(map(scored, accuracies)))
    callback.on_train_batch_start(None, None, batch, 0)
    return batch


def test_the_buffer_is_bounded_and_forgets_the_oldest(processor):
    buffer = ReplayBuffer(capacity=3)
    for number, uid in enumerate(["a", "b", "c", "a", "d"]):
        buffer.add(Experience(uid, number, answer(processor, uid), scored(1.0)))
    # The newest of each sample: a's first one left; then b's was the oldest of four.
    assert [(uid, buffer.get(uid).step) for uid in buffer.uids()] == [("c", 2), ("a", 3), ("d", 4)]
    assert buffer.get("b") is None
    assert buffer.drop(lambda held: held.step < 3) == 1
    assert buffer.uids() == ["a", "d"]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ReplayBuffer(0)


def test_right_answers_return_in_failing_groups_with_their_logprobs(processor):
    callback = callback_for(processor, weighting=ClippedRatio())
    first = step(callback, processor, 0, {"a": [0, 1, 1, 0], "b": [0, 0, 0, 0]})
    assert first.metrics["replay/kept_count"] == 1, "one answer per sample"
    assert first.metrics["replay/replayed_count"] == 0
    second = step(callback, processor, 4, {"a": [0, 0, 0, 0], "b": [0, 0, 0, 0]})
    replayed = second.groups[0].responses[-1]
    assert (replayed.text, replayed.offline) == ("<answer>0 a 1</answer>", True)
    assert replayed.logprobs.tolist() == [-0.5] * len(replayed.token_ids)
    assert [s.accuracy for s in second.scores[0]] == [0, 0, 0, 1]
    assert not any(r.offline for r in second.groups[1].responses), "nothing is known about b"
    assert second.metrics["replay/age"] == 4
    third = step(callback, processor, 5, {"a": [1, 1, 0, 0]})
    assert not any(r.offline for r in third.groups[0].responses), "0.5 is not below 0.5"
    assert len(callback.buffer) == 1, "a replayed answer is not kept again"


def test_age_ends_an_experience(processor):
    callback = callback_for(processor, max_age=2)
    step(callback, processor, 0, {"a": [1, 0, 0, 0]})
    assert len(callback.buffer) == 1
    late = step(callback, processor, 3, {"a": [0, 0, 0, 0]})
    assert late.metrics["replay/replayed_count"] == 0


def test_prompts_of_kept_answers_come_back(processor):
    callback = callback_for(processor, prompts_per_step=2)
    known = {uid: prompt(processor, uid) for uid in "abcd"}
    prepare = types.SimpleNamespace(prepare=lambda sample: known[sample.uid])
    callback._data = types.SimpleNamespace(train_samples=[p.sample for p in known.values()], preparer=prepare)
    step(callback, processor, 0, {"a": [1, 0, 0, 0], "b": [1, 0, 0, 0], "c": [1, 0, 0, 0]})
    batch = StepBatch([known["a"], known["d"]], rl_step=1)
    callback.begin(batch, callback.sampling)
    assert sorted(p.uid for p in batch.prompts) == ["a", "b", "c", "d"], "a is in the batch already"
    assert batch.metrics["replay/prompts_count"] == 2


def test_the_buffer_survives_a_checkpoint(processor):
    callback = callback_for(processor)
    step(callback, processor, 0, {"a": [1, 0, 0, 0], "b": [0, 0, 0, 1]})
    file = io.BytesIO()
    torch.save(callback.state_dict(), file)
    file.seek(0)
    other = callback_for(processor)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert callback.buffer.uids() == other.buffer.uids() == ["a", "b"]
    for mine, theirs in ((c.buffer.get(uid) for c in (callback, other)) for uid in "ab"):
        assert (mine.uid, mine.step, mine.score) == (theirs.uid, theirs.step, theirs.score)
        for field in dataclasses.fields(mine.response):
            a, b = getattr(mine.response, field.name), getattr(theirs.response, field.name)
            assert a.tolist() == b.tolist() if hasattr(a, "tolist") else a == b
    # The same next step from both.
    rows = {"a": [0, 0, 0, 0], "b": [0, 0, 0, 0]}
    one, two = (step(c, processor, 1, rows).groups for c in (callback, other))
    assert [g.responses[-1].text for g in one] == [g.responses[-1].text for g in two]
    smaller = callback_for(processor, capacity=1)
    smaller.load_state_dict(callback.state_dict())
    assert smaller.buffer.uids() == ["b"]
    # Another n changes nothing; answers beyond another response limit are forgotten.
    fewer = callback_for(processor)
    fewer.sampling = dataclasses.replace(fewer.sampling, n=2)
    fewer.load_state_dict(callback.state_dict())
    assert step(fewer, processor, 1, {"a": [0, 0]}).groups[0].responses[-1].text == "<answer>0 a 0</answer>"
    shorter = callback_for(processor)
    shorter.sampling = dataclasses.replace(shorter.sampling, max_tokens=2)
    shorter.load_state_dict(callback.state_dict())
    assert len(shorter.buffer) == 0


def test_a_buffer_of_another_tokenizer_is_refused(processor):
    callback = callback_for(processor)
    step(callback, processor, 0, {"a": [1, 0, 0, 0]})
    state = callback.state_dict()
    other = train_tokenizer([*TINY_CORPUS, "entirely different words occur here " * 20])
    stranger = callback_for(processor)
    stranger.fingerprint = tokenizer_fingerprint(other)
    with pytest.raises(ValueError, match=r"replay buffer holds tokens of tokenizer .*resume=never"):
        stranger.load_state_dict(state)
    assert tokenizer_fingerprint(processor.tokenizer) == callback.fingerprint
    assert len(stranger.buffer) == 0


def test_switched_off_it_keeps_nothing(processor):
    callback = ReplayCallback(enable=False)
    assert callback.state_dict() == {}
    batch = StepBatch([prompt(processor, "a")])
    callback.on_train_batch_start(None, None, batch, 0)
    assert batch.metrics == {}


def test_settings_out_of_range_are_said():
    for options, message in (
        ({"min_accuracy": 2.0}, r"min_accuracy=2\.0"),
        ({"group_threshold": -1.0}, r"group_threshold=-1\.0"),
        ({"group_threshold": None}, r"group_threshold=None"),
        ({"min_accuracy": None}, r"min_accuracy=None"),
        ({"prompts_per_step": -1}, r"prompts_per_step=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            ReplayCallback(**options)
