"""Trajectories become exactly the tokens that the policy would sample; what cannot is rejected with reason and id."""

from __future__ import annotations

import copy
import json
import logging

import numpy as np
import pytest
from offline_helpers import prompt, reader
from policy_helpers import load_processor

from datamodules.common.seeds import label_noise, response_seed, uniform
from lightning_modules.offline.mix import MixCallback
from lightning_modules.offline.schedule import Share, as_share
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
        ("<｜Assistant｜><answer>yes</answer>", "wrong_template", "Assistant"),
        ("<|channel|>final<|message|><answer>yes</answer>", "wrong_template", "channel"),
        ("<answer>" + "no " * 30 + "</answer>", "too_long", "response limit is 16"),
        ("<answer>yes</answer>\ud83d", "not_text", "surrogate"),
    ],
)
def test_unusable_trajectories_are_rejected_with_reason_and_id(processor, caplog, text, reason, detail):
    read = reader(processor)
    sample = prompt(processor, "src:17", text)
    with caplog.at_level(logging.WARNING):
        assert read.get(sample) is None
        assert read.get(sample) is None
    assert read.rejected["src:17"][0] == reason
    (line,) = [record.getMessage() for record in caplog.records]  # said once, however often it is asked for
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
    assert read.rejected == {}


def test_stored_logprobs_are_checked(processor):
    text = "<answer>yes</answer>"
    values = [-0.5, -1.0, 0.0, -2.0]
    found = reader(processor).get(prompt(processor, "a:1", text, offline_logprobs=values))
    assert found.logprobs.tolist() == values
    for bad, detail in (
        ([-1.0] * 3, "3 offline_logprobs for 4 tokens"),
        ([0.5, 0, 0, 0], "at most 0"),
        ([None, 0, 0, 0], "finite"),
        ([-1e300, 0, 0, 0], "finite"),  # beyond float32
        ([-(10**400), 0, 0, 0], "finite"),
        ([[-1.0], [0, 0], 0, 0], "finite"),
        (-0.5, "finite"),
        ("none", "finite"),
        ({"a": 1}, "finite"),
    ):
        read = reader(processor)
        assert read.get(prompt(processor, "a:1", text, offline_logprobs=bad)) is None
        assert detail in read.rejected["a:1"][1]
    read = reader(processor, need_logprobs=True)
    assert read.get(prompt(processor, "a:1", text)) is None
    assert read.rejected["a:1"][0] == "logprobs"


def test_trajectory_files_and_unknown_samples(processor, tmp_path):
    file = tmp_path / "t.jsonl"
    entries = [{"uid": "a:1", "offline_output": "<answer>no</answer>"}, {"uid": "gone:9", "offline_output": "x"}]
    file.write_text("\n".join(map(json.dumps, entries)))
    read = reader(processor, more=read_trajectory_files([file]))
    read.check_samples(["a:1"])
    assert read.rejected == {"gone:9": ("unknown_sample", "no training sample has this id")}
    found = read.get(prompt(processor, "a:1", "<answer>yes</answer>"))
    assert found.text == "<answer>no</answer>", "a file comes before the record"
    file.write_text('{"uid": "a:1"}\n')
    with pytest.raises(ValueError, match=r"t.jsonl:1: no trajectory"):
        read_trajectory_files([file])
    file.write_text("\n".join([json.dumps(entries[0])] * 2))
    with pytest.raises(ValueError, match=r"t.jsonl:2: a second trajectory for sample a:1"):
        read_trajectory_files([file])
    for content in ("no JSON\n", "[1]\n"):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"t.jsonl:1: no trajectory with uid and offline_output"):
            read_trajectory_files([file])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"trajectory_files: .*t.jsonl is damaged, or not UTF-8"):
        read_trajectory_files([file])
    # Before the engine starts, and only where trajectories are wanted.
    with pytest.raises(ValueError, match=r"trajectory_files: .*gone.jsonl does not exist"):
        MixCallback(trajectory_files=[tmp_path / "gone.jsonl"])
    MixCallback(enable=False, trajectory_files=[tmp_path / "gone.jsonl"])


def test_what_is_no_text_in_a_file_is_rejected_and_odd_characters_are_read(processor, tmp_path):
    file = tmp_path / "t.jsonl"
    separators = "a\u2028b\x85<answer>yes</answer>"  # line ends for Python, ordinary characters in JSON
    outputs = [["<answer>yes</answer>"], {"content": "<answer>yes</answer>"}, 7, None, separators]
    lines = [json.dumps({"uid": f"a:{i}", "offline_output": o}, ensure_ascii=False) for i, o in enumerate(outputs)]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    read = reader(processor, more=read_trajectory_files(str(file)))
    found = [read.get(prompt(processor, f"a:{i}")) for i in range(5)]
    assert [read.rejected[f"a:{i}"] for i in range(4)] == [
        ("not_text", "it is list, not text"),
        ("not_text", "it is dict, not text"),
        ("not_text", "it is int, not text"),
        ("empty", "it has no text"),
    ]
    assert found[:4] == [None] * 4
    assert found[4].text == separators


def test_many_unknown_samples_are_one_line(processor, caplog):
    more = {f"gone:{i:02}": {"offline_output": "x"} for i in range(12)}
    read = reader(processor, more=more)
    with caplog.at_level(logging.WARNING):
        read.check_samples(["a:1"])
    assert len(read.rejected) == 12
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("12 of 12 offline trajectories rejected (unknown_sample)")
    assert "gone:00, gone:01" in line
    assert line.endswith("gone:09 ...")


def test_thinking_that_the_prompt_opens_is_said_as_the_template_sets_it(processor):
    thinking = copy.deepcopy(processor)  # the form of Qwen3.5's
    thinking.chat_template = (
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}{%- if message.role == 'user' -%}"
        "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- else -%}"
        "{%- set parts = message.content.split('</think>') -%}"
        "{%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' -%}"
        "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + parts[-1].strip() -}}{%- endif -%}{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
    )
    said = "red\n</think>\n\n<answer>yes</answer>"
    for text in (f"<think>\n{said}", said, "<think>red</think><answer>yes</answer>"):
        found = reader(thinking, max_tokens=40).get(prompt(thinking, "a:1", text))
        assert found.text == said
        assert thinking.tokenizer.decode(found.token_ids) == said + "<|im_end|>"
    for text in ("<answer>yes</answer>", "First <think>red</think><answer>yes</answer>"):
        read = reader(thinking, max_tokens=40)
        assert read.get(prompt(thinking, "a:1", text)) is None
        assert read.rejected["a:1"][0] == "wrong_template"


def test_a_template_without_an_end_token_gets_the_tokenizers(processor):
    glm = copy.deepcopy(processor)  # the form of GLM-4.1V's: parts for users only, nothing behind an answer
    glm.chat_template = (
        "{%- for message in messages -%}{{- '<' + message.role + '>\\n' -}}{%- if message.role == 'user' -%}"
        "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- else -%}{{- message.content -}}"
        "{%- endif -%}{{- '\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<assistant>\\n' -}}{%- endif -%}"
    )
    found = reader(glm).get(prompt(glm, "a:1", "<answer>yes</answer>"))
    ids = [glm.tokenizer.convert_tokens_to_ids(t) for t in ("<answer>", "yes", "</answer>", glm.tokenizer.eos_token)]
    assert found.token_ids.tolist() == ids
    assert found.text == "<answer>yes</answer>"


def test_shares_move_linearly():
    share = Share(1.0, end=0.2, steps=80)
    assert [share(step) for step in (0, 40, 80, 500)] == [1.0, 0.6, 0.2, 0.2]
    assert as_share(0.3)(10**6) == 0.3
    for wrong in ({"start": 1.5}, {"start": 0.5, "end": -0.1, "steps": 3}, {"start": 0.5, "end": 0.6}):
        with pytest.raises(ValueError, match=r"out of range|at least one step"):
            Share(**wrong)


def test_draws_are_uniform_and_repeatable():
    draws = np.array([uniform("offline", 0, step, f"s:{i}") for step in range(20) for i in range(100)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs((draws < 0.25).mean() - 0.25) < 0.03
    # Values of runs that may still be resumed.
    assert uniform("offline", 0, 3, "s:1") == 0.13741333898141075
    assert response_seed(0, 3, "charades:17", 0) == 2138462676823951891
    assert label_noise(0, 3, "s:1") == (0.8134041181765497, 1501484154)
