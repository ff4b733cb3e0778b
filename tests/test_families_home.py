"""Facts about model families live in `lightning_modules/families` alone, and a user's family in the user's folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from tiny_families import FAMILIES, family_of

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.callback import check_same_distribution, resolve_sampling
from rollout.types import SamplingSpec

FACTS = re.compile(
    r"<\|(vision|image|video|begin_of|end_of|im_end|endoftext)\w*\|>|(image|video|vision)_(start_|end_)?token_id\W*[=,)\"']"
    r"|(config|processor)\.(image|video|vision)_\w*token|get_rope_index|\bmtp\.|[Pp]rocessor.*__name__"
)
HOMES = ("lightning_modules/families/", "datamodules/demo/")
"""The families; and the tiny model, which is built from its tokens."""
SPEC = "datamodules/video/spec.py"
"""Names the fields that a family fills."""


def test_no_other_package_knows_a_familys_tokens():
    found = {}
    for package in ("datamodules", "rollout", "rewards", "eval", "lightning_modules", "scripts"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            lines = path.read_text().splitlines()
            hits = [line for line in lines if FACTS.search(line) and not line.lstrip().startswith(("#", "Example"))]
            if hits and not name.startswith(HOMES):
                found[name] = hits
    assert found == {}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_trainer_and_engine_ban_the_same_ids(name, tiny_model_dir, tmp_path):
    """Also where the configuration names further tokens of its own, as released Qwen2-VL models do."""
    from tiny_families import BUILDERS
    from transformers import AutoProcessor, PreTrainedTokenizerFast

    if name == "qwen3_vl":
        config, processor = Qwen3VLFamily().open(str(tiny_model_dir)).config, AutoProcessor.from_pretrained(tiny_model_dir)
    else:
        model, processor = BUILDERS[name](PreTrainedTokenizerFast.from_pretrained(tiny_model_dir))
        config = model.config
    config.vision_token_id = 300
    config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)

    class Module:
        banned_ids = family_of(name).open(str(tmp_path)).banned_ids

    sampling = resolve_sampling(SamplingSpec(), tmp_path, family_of(name))
    check_same_distribution(Module, sampling)
    reserved = family_of(name).open(str(tmp_path)).media_spec(processor).reserved_tokens
    assert set(processor.tokenizer.convert_tokens_to_ids(list(reserved))) == set(sampling.banned_ids)
    assert not set(sampling.stop_ids) & set(sampling.banned_ids)
