"""Trajectories become exactly the tokens that the policy would sample; what cannot is rejected with reason and id."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from offline_helpers import prompt, reader
from policy_helpers import load_processor

from lightning_modules.offline.schedule import Share, as_share, uniform
from lightning_modules.offline.trajectories import read_trajectory_files


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def test_tokens_are_the_assistant_turn_with_the_end_token(processor):
    found = reader(processor).get(prompt(processor, "a:1", "<answer>yes</answer>"))
    tokenizer = processor.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<answer>", "yes", "</answer>", "<|im_end|>")]
    assert found.token_ids.tolist() == ids
    assert found.token_ids.dtype == np.int32
    assert np.isnan(found.logprobs).all(), "nobody said how likely it was"
    response = found.response()
    assert (response.offline, response.finish_reason, response.text) == (True, "stop", "<answer>yes</answer>")
    assert response.offline_mask.tolist() == [True] * 4
    # The same as the template's own rendering of the whole conversation, minus the prompt.
    conversation = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "<answer>yes</answer>"},
    ]
    whole = processor.apply_chat_template(conversation, tokenize=False)
    assert whole.endswith(tokenizer.decode(ids) + "\n")


def test_a_written_end_token_is_not_doubled(processor):
    plain = reader(processor).get(prompt(processor, "a:1", "<answer>yes</answer>"))
    ended = reader(processor).get(prompt(processor, "a:1", "<answer>yes</answer><|im_end|>\n"))
    assert ended.token_ids.tolist() == plain.token_ids.tolist()


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("  \n", "empty", "no text"),
        ("It is red.", "no_answer", "<answer>"),
        ("<answer></answer>", "no_answer", "<answer>"),
        ("<think>I wonder <answer>yes</answer>", "no_answer", "never ends"),
        ("<answer>yes</answer><|image_pad|>", "placeholder", r"<\|image_pad\|>"),
        ("<|im_start|>assistant\n<answer>yes</answer>", "wrong_template", "im_start"),
        ("[INST] q [/INST] <answer>yes</answer>", "wrong_template", "INST"),
        ("<answer>yes</answer><|eot_id|>", "wrong_template", "eot_id"),
        ("<answer>" + "no " * 30 + "</answer>", "too_long", "response limit is 16"),
    ],
)
def test_unusable_trajectories_are_rejected_with_reason_and_id(processor, caplog, text, reason, detail):
    read = reader(processor)
    sample = prompt(processor, "src:17", text)
    with caplog.at_level(logging.WARNING):
        assert read.get(sample) is None
        assert read.get(sample) is None
    assert read.rejections.counts() == {reason: 1}, "counted once, however often it is asked for"
    assert read.rejections.metrics() == {"offline/rejected_count": 1.0}
    assert read.rejections.metrics() == {"offline/rejected_count": 0.0}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "src:17" in line
    assert reason in line
    import re

    assert re.search(detail, line)


def test_the_length_limit_counts_the_end_token(processor):
    sample = prompt(processor, "a:1", "<answer>yes</answer>")
    assert reader(processor, max_tokens=4).get(sample) is not None
    assert reader(processor, max_tokens=3).get(sample) is None


def test_a_sample_without_a_trajectory_is_no_rejection(processor):
    read = reader(processor)
    assert read.get(prompt(processor, "a:1")) is None
    assert read.rejections.items == {}


def test_stored_logprobs_are_checked(processor):
    text = "<answer>yes</answer>"
    values = [-0.5, -1.0, 0.0, -2.0]
    found = reader(processor).get(prompt(processor, "a:1", text, offline_logprobs=values))
    assert found.logprobs.tolist() == values
    for bad, detail in (([-1.0] * 3, "3 offline_logprobs for 4 tokens"), ([0.5, 0, 0, 0], "at most 0")):
        read = reader(processor)
        assert read.get(prompt(processor, "a:1", text, offline_logprobs=bad)) is None
        assert detail in read.rejections.items["a:1"][1]
    read = reader(processor, need_logprobs=True)
    assert read.get(prompt(processor, "a:1", text)) is None
    assert read.rejections.items["a:1"][0] == "logprobs"


def test_trajectory_files_and_unknown_samples(processor, tmp_path):
    file = tmp_path / "t.jsonl"
    entries = [{"uid": "a:1", "offline_output": "<answer>no</answer>"}, {"uid": "gone:9", "offline_output": "x"}]
    file.write_text("\n".join(map(json.dumps, entries)))
    read = reader(processor, more=read_trajectory_files([file]))
    read.check_samples(["a:1"])
    assert read.rejections.items == {"gone:9": ("unknown_sample", "no training sample has this id")}
    found = read.get(prompt(processor, "a:1", "<answer>yes</answer>"))
    assert found.text == "<answer>no</answer>", "a file comes before the record"
    file.write_text('{"uid": "a:1"}\n')
    with pytest.raises(ValueError, match=r"t.jsonl:1: no trajectory"):
        read_trajectory_files([file])
    file.write_text("\n".join([json.dumps(entries[0])] * 2))
    with pytest.raises(ValueError, match=r"t.jsonl:2: a second trajectory for sample a:1"):
        read_trajectory_files([file])


def test_shares_move_linearly():
    share = Share(1.0, end=0.2, steps=80)
    assert [share(step) for step in (0, 40, 80, 500)] == [1.0, 0.6, 0.2, 0.2]
    assert as_share(0.3)(10**6) == 0.3
    for wrong in ({"start": 1.5}, {"start": 0.5, "end": -0.1, "steps": 3}, {"start": 0.5, "end": 0.6}):
        with pytest.raises(ValueError, match=r"share|step"):
            Share(**wrong)


def test_draws_are_uniform_and_repeatable():
    draws = np.array([uniform(0, step, f"s:{i}") for step in range(20) for i in range(100)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs((draws < 0.25).mean() - 0.25) < 0.03
    assert uniform(0, 3, "s:1") == uniform(0, 3, "s:1") != uniform(1, 3, "s:1")
