"""Benchmarks inside a real training run, and the command line on the run that it leaves: one figure on every way."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from test_eval_pipeline_benchmark import drawn  # noqa: F401 - a fixture
from train_helpers import command, environment, run
from waiting import until

from datamodules.common.files import FolderInUse, FolderLock
from eval.run.records import read_records

STEPS = 3
NAMES = ("charades_sta", "videomme")
SAME_FRAMES = ("frames.max_frames=64", "frames.min_pixels=2048", "frames.max_pixels=8192", "sampling.max_tokens=10")
"""What experiment=tiny_cpu shows its model."""


@pytest.fixture(scope="module")
def trained(tiny_assets, drawn, tmp_path_factory) -> Path:  # noqa: F811
    """Three steps with the colocated vLLM engine, twelve items of two benchmarks before and after every step."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run(
        "experiment=tiny_cpu",
        f"assets_dir={tiny_assets}",
        f"run_dir={run_dir}",
        f"max_steps={STEPS}",
        "data.rollout_batch_size=4",
        "rollout.sampling.n=4",
        "data.max_val_samples=4",
        "callbacks=benchmarks",
        "callbacks.evaluation.every_n_steps=1",
        "callbacks.checkpoint.every_n_steps=100",
        "callbacks.checkpoint.keep_last=1",
        f"callbacks.evaluation.slices.benchmarks=[{','.join(NAMES)}]",
        f"callbacks.evaluation.slices.data_root={drawn}",
        "callbacks.evaluation.slices.limit=12",
        "callbacks.evaluation.slices.batch_size=4",
    )
    return run_dir


def evaluation(run_dir: Path, step: int) -> dict:
    return json.loads((run_dir / "evaluation" / f"step_{step:06d}.json").read_text())


def evaluate(*arguments: str) -> str:
    return run(*arguments, script="evaluate.py")


def on_model(model: Path, data: Path, output: Path, *more: str) -> tuple[str, ...]:
    """The command that asks a model what the slices asked it, through transformers instead of vLLM."""
    where = (f"model={model}", "benchmark=charades_sta", f"data_root={data}", f"output_dir={output}")
    engine = ("driver=hf", "driver.engine.dtype=float32", "driver.engine.max_model_len=2048", "driver.batch_size=1")
    return (*where, *engine, *SAME_FRAMES, "prepare.processes=1", "report_items=0", *more)


def result(output: Path) -> tuple[dict, dict[str, str]]:
    """(figures, responses by uid) of the only run in a folder."""
    (path,) = output.rglob("result.json")
    answers = read_records(path.parent / "answers.jsonl")
    return json.loads(path.read_text()), {uid: answer["response"] for uid, answer in answers.items()}


def responses(run_dir: Path, step: int, name: str = "charades_sta") -> dict[str, str]:
    return {row["uid"]: row["response"] for row in evaluation(run_dir, step)["slices"][name]}


def test_every_item_of_a_slice_has_one_state_at_every_step_and_the_loggers_have_the_figures(trained):
    with (trained / "metrics.csv").open(newline="") as file:
        logged = {int(row["step"]): row for row in csv.DictReader(file)}
    for step in range(STEPS + 1):
        saved = evaluation(trained, step)
        heads = []
        for name in NAMES:
            rows = saved["slices"][name]
            assert [row["uid"] for row in rows] == sorted({row["uid"] for row in rows}, key=lambda u: (len(u), u))
            assert len(rows) == 12
            assert {row["state"] for row in rows} <= {"ok", "unparsed"}
            # By hand: mean over all twelve, unparsed ones as 0.
            mean = sum(row["official"]["accuracy"] if row["state"] == "ok" else 0.0 for row in rows) / 12
            metric = {"charades_sta": "mIoU", "videomme": "accuracy"}[name]
            assert saved["metrics"][f"eval/{name}/{metric}"] == pytest.approx(100 * mean)
            heads.append(100 * mean)
        assert saved["metrics"]["eval/mean"] == pytest.approx(sum(heads) / 2)
        for key, value in saved["metrics"].items():
            assert float(logged[step][key]) == pytest.approx(value), key


def test_the_best_step_by_a_benchmark_keeps_its_checkpoint(trained):
    values = {step: evaluation(trained, step)["metrics"]["eval/mean"] for step in range(STEPS + 1)}
    best = max(range(1, STEPS + 1), key=lambda step: (values[step], -step))
    remembered = {"step": best, "metric": "eval/mean", "value": values[best], "start": values[0]}
    assert json.loads((trained / "evaluation" / "best.json").read_text()) == remembered
    kept = {path.name for path in (trained / "checkpoints").iterdir()}
    assert kept == {f"step_{step:08d}" for step in (best, STEPS)}


def test_the_command_on_a_run_gives_the_figures_of_its_last_step(trained):
    output = evaluate(f"run={trained}")
    final = json.loads((trained / "evaluation" / "final.json").read_text())
    last = evaluation(trained, STEPS)
    assert final["step"] == STEPS
    assert {r["uid"]: r["response"] for r in final["records"]} == {r["uid"]: r["response"] for r in last["records"]}
    assert final["metrics"]["val/accuracy_mean"] == last["metrics"]["val/accuracy_mean"]
    assert "held-out accuracy" in output


def test_a_run_as_model_killed_continued_and_scored_again_gives_the_slice(trained, drawn, tmp_path):  # noqa: F811
    asked = on_model(trained, drawn, tmp_path)
    process = subprocess.Popen(command(*asked, script="evaluate.py"), cwd=ROOT, env=environment())

    def answered() -> bool:
        return any(path.read_bytes().count(b"\n") for path in tmp_path.rglob("answers.jsonl"))

    until(lambda: answered() or process.poll() is not None, "the first answer", 240)
    (path,) = tmp_path.rglob("answers.jsonl")
    with pytest.raises(FolderInUse, match=f"process {process.pid} "):
        FolderLock(path.parent)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(read_records(path))
    assert 1 <= before < 12, "the evaluation was not killed in its middle"
    assert not list(tmp_path.rglob("result.json"))
    assert f"12 items, {12 - before} to ask" in evaluate(*asked)

    figures, said = result(tmp_path)
    assert said == responses(trained, STEPS)
    assert figures["model"] == "run-step_00000003"
    assert figures["headline"]["mIoU"] == evaluation(trained, STEPS)["metrics"]["eval/charades_sta/mIoU"]
    (path.parent / "result.json").unlink()
    evaluate(*asked, "stage=score")
    again, _ = result(tmp_path)
    for figure in ("headline", "robust_headline", "tables", "counts", "is_partial", "reason", "key"):
        assert again[figure] == figures[figure]
    with FolderLock(path.parent):
        refused = run(*asked, "stage=aggregate", script="evaluate.py", check=1)
    assert f"is being written by process {os.getpid()} " in refused
    assert "Traceback" not in refused


def test_the_best_checkpoint_as_model_says_what_it_said_during_training(trained, drawn, tmp_path):  # noqa: F811
    best = json.loads((trained / "evaluation" / "best.json").read_text())["step"]
    evaluate(*on_model(trained / "checkpoints" / f"step_{best:08d}", drawn, tmp_path))
    figures, said = result(tmp_path)
    assert figures["model"] == f"run-step_{best:08d}"
    assert said == responses(trained, best)


def test_a_slice_covers_all_tasks_of_a_benchmark(tmp_path):
    from eval_official_files import mvbench

    from eval.benchmarks import catalogue
    from eval.benchmarks.loading import load
    from eval.slices import evenly_spaced

    mvbench(tmp_path / "mvbench")
    items, _ = load(catalogue.get("mvbench"), tmp_path)
    many = [item for item in items for _ in range(200)]  # 20 tasks of 200, as published
    assert [item.meta["_task"] for item in evenly_spaced(many, 40)[::2]] == [item.meta["_task"] for item in items]
    assert evenly_spaced(items, 20) == evenly_spaced(items, None) == items
    assert [items.index(item) for item in evenly_spaced(items[:10], 3)] == [0, 3, 6]


def test_list_names_what_is_on_this_disk(drawn):  # noqa: F811
    lines = {line.split()[1]: line for line in evaluate("list", f"data_root={drawn}").splitlines() if ":" in line[:9]}
    assert lines["charades_sta"].endswith("there (reference)")
    assert "3720" in lines["charades_sta"]
    assert "missing" in lines["lvbench"]
