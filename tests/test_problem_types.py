"""Problem types have one registry, the reward's routes: every name and alias is loaded, prompted and scored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from datamodules.annotations import load_samples
from datamodules.common.places import CONF_DIR
from datamodules.prompts import PromptTemplates, slug
from datamodules.video_rl import VideoRLDataModule
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.launch.config import ConfigError, build, build_data, compose
from lightning_modules.launch.held_out import evaluate_run
from lightning_modules.launch.runs import load_run_config
from rollout.types import Response

REWARDS = sorted(path.stem for path in (CONF_DIR / "reward").glob("*.yaml"))
OPTIONS = ["A. a cup", "B. a dog"]
GOLDS = {
    "multiple choice": "B",
    "numerical": "3",
    "regression": "3",
    "boolean": "yes",
    "temporal grounding": "[1.0, 3.0]",
    "spatial grounding": "[1, 2, 30, 40]",
    "spatial temporal grounding": '{"time": [1, 2], "boxes": {"1": [1, 2, 30, 40], "2": [1, 2, 30, 40]}}',
    "tracking": '{"boxes": {"1": [1, 2, 30, 40], "2": [1, 2, 30, 40]}}',
    "math": "2",
    "ordering": "A, B",
    "html": "<html><body><p>hello</p></body></html>",
    "svg": '<svg width="64" height="64"><rect x="8" y="8" width="20" height="20" fill="red"/></svg>',
    "code": "def add(a, b):\n    return a + b",
    "captioning (judge reply parse)": "A",
}
"""An answer that its type gives full marks; the others compare text."""


def router_of(name: str):
    return build(compose("train", [f"reward={name}"]).reward, judge=None)


def respond(text: str) -> Response:
    return Response(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", text, 0)


def spellings(router) -> dict[str, str]:
    """Every way to write a problem type -> its one name."""
    return {spelling: name for name, task in router.tasks.items() for spelling in (name, *task.aliases)}


@pytest.mark.parametrize("reward", REWARDS)
def test_every_route_and_alias_is_loaded_prompted_and_scored(tmp_path: Path, reward: str):
    router = router_of(reward)
    known = spellings(router)
    for name, spelling in [(name, spelling) for spelling, name in known.items()]:
        known[spelling.upper().replace(" ", "-")] = name
    rows = [
        {"problem": "What?", "problem_type": spelling, "answer": GOLDS.get(name, "a dog"), "problem_id": number}
        | ({"options": OPTIONS} if name == "multiple choice" else {})
        | ({"tests": ["assert add(1, 2) == 3"]} if name == "code" else {})
        for number, (spelling, name) in enumerate(known.items())
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (samples,), report = load_samples([file], router.type_name)
    assert report.num_dropped == 0, report.text()
    assert [sample.problem_type for sample in samples] == list(known.values())
    templates = PromptTemplates(type_name=router.type_name)
    with router:
        for sample in samples:
            own = slug(sample.problem_type) in templates.names()
            assert ("final answer inside" in templates.render(sample)) == (not own)
            score = router.submit_response(sample, respond(f"<answer>{sample.answer}</answer>")).result(timeout=120)
            assert score.status in ("ok", "not_judged"), (sample, score)


def test_an_unknown_type_is_left_out_with_the_nearest_names(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({"problem": "q", "problem_type": "mutiple choise", "answer": "A"}) + "\n")
    (samples,), report = load_samples([file], router_of("default").type_name)
    assert samples == []
    assert [(i.line, i.kind) for i in report.issues] == [(1, "unknown problem type")]
    assert "did you mean 'multiple choice'" in report.text()


def test_an_alias_in_a_mixture_has_the_gold_check_and_the_metrics_name_of_its_type(tmp_path: Path):
    rows = [
        {"problem": "q", "problem_type": kind, "options": OPTIONS, "answer": answer}
        for kind, answer in (("multiple choice", "A"), ("mcq", "B"), ("MC", "C"))
    ]
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.json").write_text(json.dumps([row]))
    groups, report = load_samples([tmp_path / f"{n}.json" for n in range(3)], router_of("default").type_name)
    assert [[sample.problem_type for sample in group] for group in groups] == [["multiple choice"]] * 2 + [[]]
    assert report.counts == {"gold not in options": 1}


def test_templates_of_aliases_serve_their_type(tmp_path: Path):
    name = router_of("default").type_name
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "default.jinja").write_text("plain {{ problem }}")
    (folder / "mcq.jinja").write_text("letters {{ problem }}")
    (tmp_path / "boxes.jinja").write_text("boxes {{ problem }}")
    templates = PromptTemplates(folder, {"Visual Grounding": str(tmp_path / "boxes.jinja")}, type_name=name)
    assert templates.names() == ("default", "multiple_choice", "spatial_grounding")
    (folder / "choice.jinja").write_text("other words")
    with pytest.raises(ValueError, match="another template serves 'multiple_choice' too, and differs"):
        PromptTemplates(folder, type_name=name)


def test_the_data_module_of_a_run_knows_the_types_of_its_reward(tmp_path: Path, tiny_model_dir: Path):
    file = tmp_path / "train.jsonl"
    rows = [{"problem": "q", "problem_type": kind, "answer": "A, B"} for kind in ("event order", "ordering", "mcq")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [f"data.train_files={file}", f"model.path={tiny_model_dir}", "data.cache_dir=null"]
    for reward, kept in (("default", ["multiple choice"]), ("ordering", ["ordering", "ordering", "multiple choice"])):
        data = build_data(compose("train", [f"reward={reward}", *run]))
        data.setup()
        assert [sample.problem_type for sample in data.train_samples] == kept
    data = build_data(compose("train", ["reward=judge", *run]))  # where the judge stands is not needed
    assert data.type_name("caption") == "open ended"
    alone = VideoRLDataModule(str(tiny_model_dir), str(file), family=Qwen3VLFamily())
    alone.setup()
    assert [sample.problem_type for sample in alone.train_samples] == ["event order", "ordering", "mcq"]


@pytest.mark.parametrize("sign", ["", "+"])
def test_the_former_list_of_types_is_answered_in_words(sign: str):
    with pytest.raises(ConfigError, match=r"data\.problem_types is no longer a setting: .*reward=\.\.\., add yours"):
        compose("train", [f"{sign}data.problem_types=[mine]"])


def test_a_run_folder_of_an_earlier_version_still_opens(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("data: {problem_types: [mine], fps: 1.0}\n")
    assert load_run_config(tmp_path).data == {"fps": 1.0}


def test_a_run_of_an_earlier_version_is_refused_in_words_where_its_parts_have_moved(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("data: {val_files: [val.jsonl]}\nreward: {_target_: rewards.gone.Router}\n")
    with pytest.raises(ConfigError, match=r"trained by an earlier version.*export_hf\.py"):
        evaluate_run(tmp_path)
