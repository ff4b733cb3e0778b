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
    r"<\|(vision|image|video|begin_of|end_of|im_end|endoftext)\w*\|>|get_rope_index|\bmtp\."
    r"|(?<!rules\.)\b(image|video|vision)_(start_|end_)?token_id\W*[=,)}\"']|(config|processor)\.(image|video|vision)_\w*token"
)
HOMES = ("lightning_modules/families/", "datamodules/demo/")
"""The families; and the tiny model, which is built from its tokens."""


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
        config = Qwen3VLFamily().open(str(tiny_model_dir)).config
        processor = AutoProcessor.from_pretrained(tiny_model_dir)
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


def blocks(language):
    """The code blocks of one language on the page about families."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "adding-a-family.md").read_text(), re.DOTALL)


def test_evaluation_finds_the_pages_family_by_the_models_type(tiny_model_dir, tmp_path):
    """One Python file and one YAML in a folder outside; without it the project's own family."""
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (code,), (options,) = blocks("python"), blocks("yaml")
    (own / "my_family.py").write_text(code)
    (own / "model" / "mine.yaml").write_text(options)
    look = (
        "import sys; from pathlib import Path\n"
        "from datamodules.common.places import add_config_dirs\n"
        "from lightning_modules.launch.benchmarks import family_node\n"
        "from lightning_modules.launch.config import build\n"
        "print(family_node(Path(sys.argv[1]))['_target_']); add_config_dirs([sys.argv[2]])\n"
        "node = family_node(Path(sys.argv[1])); print(node['_target_'], build(node).open(sys.argv[1]).name)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", look, str(tiny_model_dir), str(own)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert found.returncode == 0, found.stderr
    names = ["lightning_modules.families.qwen3_vl.Qwen3VLFamily", "my_family.MyFamily", "my_family"]
    assert found.stdout.split() == names


def test_a_model_that_no_family_handles_is_refused_in_words(tmp_path):
    from lightning_modules.launch.benchmarks import family_node
    from lightning_modules.launch.config import ConfigError

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vlm"}))
    with pytest.raises(ConfigError, match=r"no family in conf/model handles model_type=qwen3_vlm.*qwen3_vl"):
        family_node(tmp_path)
