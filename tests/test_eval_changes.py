"""What changes between two runs of one command: media, questions, damaged records, an engine that does not start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_eval_pipeline_benchmark import drawn, make_run  # noqa: F401 - a fixture

from datamodules.common.files import write_lines
from eval.benchmarks.types import BenchmarkItem
from eval.engine.errors import EngineLostError
from eval.engine.generate import LockStepDriver
from eval.run.pipeline import item_digest, open_items
from eval.run.records import RecordLog, read_records
from eval.run.runner import BenchmarkRun
from rewards.router import RewardRouter


@pytest.fixture
def data(tmp_path, drawn) -> Path:  # noqa: F811
    """Four multiple-choice questions, each on a clip of its own."""
    folder = tmp_path / "data"
    shutil.copytree(drawn, folder)
    path = folder / "videomme" / "videomme.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:4]))
    return folder


def clip(data: Path, number: int) -> Path:
    return data / json.loads((data / "videomme" / "videomme.json").read_text())[number]["path"]


def answer(path: Path, items: list[BenchmarkItem]) -> None:
    """Answers as the pipeline writes them."""
    write_lines(path, [{"uid": i.uid, "state": "answered", "item": item_digest(i), "response": "A"} for i in items])


def left(run: BenchmarkRun) -> list[int]:
    """Numbers of the questions that the command would ask now."""
    run.prepare()
    log = RecordLog(run.folder / "answers.jsonl")
    log.close()
    return [int(item.uid.partition(":")[2][:3]) for item in open_items(run.items(), log.records)]


def test_an_answer_belongs_to_its_question_and_media_and_damaged_records_are_asked_again(
    tmp_path, data, tiny_model_dir
):
    run = make_run(tmp_path / "out", data, tiny_model_dir, "videomme")
    kept = clip(data, 0).rename(tmp_path / "kept.mp4")
    run.prepare()
    path = run.folder / "answers.jsonl"
    answer(path, run.items())
    assert left(run) == []
    kept.rename(clip(data, 0))  # downloaded at last
    assert left(run) == [0]
    answer(path, run.items())
    shutil.copy(clip(data, 2), clip(data, 1))  # another video in the place of the old one
    assert left(run) == [1]
    moved = make_run(tmp_path / "out", data.rename(tmp_path / "elsewhere"), tiny_model_dir, "videomme")
    assert left(moved) == [1]
    answer(path, moved.items())
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [b'{"uid": "videomme:003-1"}\n', b"[]\n", b"\xff\xfe\n", b"\0" * 20 + b"\n", b'{"uid": "vid']
    path.write_bytes(b"".join([lines[0], *damaged[:-1], lines[1], lines[2], damaged[-1]]))
    assert left(moved) == [3]


def lost():
    """A driver whose engine is gone."""

    def generate(requests):
        raise EngineLostError("the device is gone")
        yield

    return LockStepDriver(generate, batch_size=4)


def test_what_was_answered_before_a_question_changed_is_not_counted_and_the_stages_say_what_lacks(
    tmp_path, data, tiny_model_dir
):
    run = make_run(tmp_path / "out", data, tiny_model_dir, "videomme")
    run.prepare()
    answer(run.folder / "answers.jsonl", run.items())
    path = data / "videomme" / "videomme.json"
    records = json.loads(path.read_text())
    with RewardRouter() as router:
        assert run.run(lost, router)["unasked"] == 0
        records[1]["problem"] += " Look closely."
        path.write_text(json.dumps(records))
        run.prepare()
        with pytest.raises(EngineLostError, match="1 items could not be asked, the engine is gone"):
            run.run(lost, router, "infer")
        for stage in ("aggregate", "score"):
            result = run.run(lost, router, stage)
            assert (result["unasked"], result["counts"]["n_failed"], result["is_partial"]) == (1, 1, True)
            assert result["reason"] == "1 items have not been asked"
        items = run.folder / "items.jsonl"
        items.write_bytes(items.read_bytes().replace(b'{"uid"', b'{"xid"', 1))
        with pytest.raises(ValueError, match=r"items.jsonl holds 3 of 4 questions: it is damaged"):
            run.run(lost, router, "score")
        (run.folder / "run.json").write_text('{"report"')
        with pytest.raises(ValueError, match=r"run.json is damaged"):
            run.run(lost, router, "aggregate")
    assert len(read_records(run.folder / "answers.jsonl")) == 4


def test_an_engine_that_cannot_start_is_said_and_what_is_finished_is_reported(
    tmp_path,
    drawn,  # noqa: F811
    tiny_model_dir,
    caplog,
):
    from lightning_modules.launch.evaluate_cli import _run

    rest = ["driver=hf", "driver.engine.dtype=float32", "driver.engine.max_model_len=2048", "prepare.processes=1"]
    rest += [f"model={tiny_model_dir}", f"data_root={drawn}", f"output_dir={tmp_path}", "model_name=m", "limit=1"]
    rest += ["sampling.max_tokens=4"]
    assert _run(["benchmark=charades_sta", "stage=prepare", *rest]) == 0
    (folder,) = (tmp_path / "m").iterdir()
    (item,) = read_records(folder / "items.jsonl").values()
    run = make_run(tmp_path, drawn, tiny_model_dir, limit=1)
    run.folder = folder
    assert [entry.uid for entry in run.items()] == [item["uid"]]
    answer(folder / "answers.jsonl", run.items())
    both = "benchmark=[charades_sta,videomme,tempcompass]"
    assert _run([both, *rest, "+driver.engine.device=nowhere"]) == 1
    said = [record.getMessage() for record in caplog.records if "incomplete" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("incomplete: videomme and what follows: RuntimeError: ")
    assert "nowhere" in said[0]
    report = json.loads((tmp_path / "m" / "report.json").read_text())
    assert [result["benchmark"] for result in report["results"]] == ["charades_sta"]
