"""What a user adds lies in a folder of their own; the pages' examples are taken out of the pages and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from datamodules.prompts import PromptTemplates
from datamodules.types import Sample

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(?:python|yaml|jinja)\n(?:#|\{#) (mine/[\w./]+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block whose first line names a file in the user's folder."""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The user's folder with all files of all pages."""
    top = tmp_path_factory.mktemp("elsewhere")
    for page in PAGES:
        for name, content in BLOCK.findall(page.read_text()):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(content)
    return top / "mine"


def python(mine, *arguments: str) -> str:
    """Output of a Python program that is run beside the user's folder, not in the checkout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EVR1_")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=mine.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(mine, *overrides: str) -> str:
    return python(mine, str(ROOT / "train.py"), *overrides)


def test_the_pages_give_every_kind_of_file(mine):
    found = {path.relative_to(mine).as_posix() for path in mine.rglob("*") if path.is_file()}
    assert found >= {
        *("my_algorithm.py", "algorithm/mine.yaml", "my_reward.py", "reward/mine.yaml"),
        *("benchmark/mybench.yaml", "my_family.py", "model/mine.yaml", "prompts/default.jinja"),
    }


@pytest.mark.parametrize(
    "folder", [["--config-dir", "mine"], ["--config-dir=mine"], ["config_dir=mine"], ["hydra.searchpath=[file://{}]"]]
)
def test_an_algorithm_a_reward_and_a_family_are_found_and_built(mine, folder):
    folder = [part.format(mine) for part in folder]
    chosen = ("algorithm=mine", "reward=mine", "model=mine", "data.prompt_templates=mine/prompts")
    output = train(mine, "experiment=tiny_cpu", *chosen, *folder, "preflight=only")
    assert "plan only, nothing was loaded: ready" in output


def test_a_reward_scores(mine):
    record = {"problem_type": "event order", "response": "<answer>B, A, C</answer>", "ground_truth": "A, B, C"}
    (mine.parent / "answers.jsonl").write_text(json.dumps(record))
    environment = [
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rewards.score import main; sys.exit(main())",
    ]
    arguments = ("answers.jsonl", "--config", "mine", "--config-dir", "mine")
    line = python(mine, *environment, *arguments).splitlines()[0]
    assert json.loads(line)["accuracy"] == pytest.approx(2 / 3)


def test_a_benchmark_is_listed_and_its_files_are_found(mine):
    data = mine.parent / "data" / "mybench"
    data.mkdir(parents=True)
    (data / "questions.jsonl").write_text("{}\n")
    output = python(mine, str(ROOT / "evaluate.py"), "list", "config_dir=mine", "data_root=data")
    line = next(line for line in output.splitlines() if "mybench" in line)
    assert "there (official)" in line


def test_the_prompt_template_is_the_question_asked(mine):
    sample = Sample("a", "Which is red?", "A", "multiple choice", "text", options=("A. this", "B. that"))
    text = PromptTemplates(mine / "prompts").render(sample)
    assert text == "Which is red?\nA. this\nB. that\nAnswer in <answer></answer>."


STAGE = """
import json, os, sys
from pathlib import Path
import my_algorithm
from lightning_modules.launch.config import compose
found = compose("train", ["algorithm=mine"]).algorithm._target_
Path(sys.argv[1]).write_text(json.dumps([found, my_algorithm.__file__, os.getpid()]))
"""


def test_stages_and_sweeps_see_the_folder_too(mine):
    (mine / "my_stage.py").write_text(STAGE)
    (mine / "experiment").mkdir()
    (mine / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /data: synthetic\n"
        "name: mine\nmodel: {path: nowhere}\ndata: {train_files: [nowhere]}\n"
        "stages:\n  - {name: look, module: my_stage, overrides: ['${output_dir}/seed${seed}.json']}\n"
    )
    train(mine, "-m", "experiment=mine", "seed=1,2", "config_dir=mine", "preflight=off", f"output_dir={mine.parent}")
    found = [json.loads((mine.parent / f"seed{seed}.json").read_text()) for seed in (1, 2)]
    assert {(target, file) for target, file, _ in found} == {("my_algorithm.Mine", str(mine / "my_algorithm.py"))}
    assert len({process for _, _, process in found}) == 2


@pytest.mark.parametrize("chosen", ["run_dir=chosen", "run_name=named", "seed=3"])
def test_a_stage_may_name_the_folder_of_the_run(mine, chosen):
    """The evaluation at the end of a pipeline is told where the run lies, however that was decided."""
    (mine / "my_arguments.py").write_text("import pathlib, sys\npathlib.Path('said.txt').write_text(sys.argv[1])\n")
    (mine / "experiment").mkdir(exist_ok=True)
    (mine / "experiment" / "told.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: synthetic\n"
        "name: told\nmodel: {path: nowhere}\ndata: {train_files: [nowhere]}\n"
        "stages:\n  - {name: look, module: my_arguments, overrides: ['run=${run_dir}']}\n"
    )
    log = train(mine, "experiment=told", chosen, "config_dir=mine", "preflight=off", "output_dir=out")
    told = (mine.parent / "said.txt").read_text()
    assert told.startswith(("run=chosen", "run=out/told/named", "run=out/told/seed3-"))
    assert f"run folder: {told.removeprefix('run=')}\n" in log


@pytest.mark.parametrize("value", ["nowhere", "[mine,nowhere]", "mine/my_algorithm.py"])
def test_what_is_no_folder_is_said(mine, value, capsys, monkeypatch):
    from lightning_modules.launch.cli import main

    monkeypatch.chdir(mine.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("EVR1_CONFIG_DIR", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    assert main(["experiment=tiny_cpu", f"config_dir={value}"]) == 2
    assert "is not a folder" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_train_with_the_users_algorithm(mine, tiny_assets, tmp_path):
    from test_train_survival import arguments
    from train_helpers import rows, run

    two = ("strategy=ddp", "trainer.devices=2", "rollout=hf", "max_steps=1")
    run(*arguments(tiny_assets, tmp_path / "run", *two), f"config_dir={mine}", "algorithm=mine")
    assert "policy/my_diagnostic" in rows(tmp_path / "run")[1]
