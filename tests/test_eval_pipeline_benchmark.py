"""A whole benchmark run on real clips with a real model: resume after kill -9, stages, honest counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from datamodules.common.files import FolderInUse, FolderLock
from eval.benchmarks import catalogue
from eval.run.prepare import PrepareSettings
from eval.run.records import read_records
from eval.run.runner import BenchmarkRun, RunOptions
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.types import SamplingSpec

sys.path.insert(0, str(ROOT / "scripts"))

FRAMES = {"max_frames": 4, "max_pixels": 8192, "min_pixels": 2048}


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    """Twelve temporal and twelve multiple-choice questions on drawn H.264 clips, in the reference's file format."""
    from eval_demo import drawn_data

    folder = tmp_path_factory.mktemp("drawn")
    drawn_data(folder)
    return folder


def make_run(output: Path, data: Path, model: Path, name: str = "charades_sta", **options) -> BenchmarkRun:
    from rollout.callback import resolve_sampling

    spec = resolve_sampling(SamplingSpec(n=1, temperature=0.0, max_tokens=8), model, Qwen3VLFamily())
    settings = RunOptions(
        output_dir=str(output),
        data_root=str(data),
        model_name="tiny",
        model_id="tiny",
        sampling=spec,
        **{"processes": 1, **options},
    )
    prepare = PrepareSettings(str(model), Qwen3VLFamily(), frame_overrides=FRAMES, thumbnails=True)
    return BenchmarkRun(catalogue.get(name), settings, prepare)


def make_driver(model: Path, calls: list):
    """The lock-step driver on transformers, one request at a time."""

    def build():
        from eval.engine.generate import LockStepDriver
        from rollout.engines.hf import HFEngine

        engine = HFEngine(model, Qwen3VLFamily())

        def generate(requests):
            calls.extend(request.request_id for request in requests)
            yield from engine.generate(requests)

        return LockStepDriver(generate, batch_size=1)

    return build


class KilledAt(list):
    """List of requests whose process is killed when it reaches `count`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def extend(self, requests) -> None:
        super().extend(requests)
        if len(self) >= self.count:
            os.kill(os.getpid(), signal.SIGKILL)


def evaluate(output: Path, data: Path, model: Path, stage: str = "all", calls: list | None = None, **options):
    from rewards.router import RewardRouter

    driver = make_driver(model, [] if calls is None else calls)
    with RewardRouter() as router:
        return make_run(output, data, model, **options).run(driver, router, stage)


def figures(result: dict) -> str:
    kept = ("headline", "robust_headline", "tables", "counts", "is_partial", "comparable", "reason", "key")
    return json.dumps({name: result[name] for name in kept}, sort_keys=True)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, drawn, tiny_model_dir):
    output = tmp_path_factory.mktemp("finished")
    return output, evaluate(output, drawn, tiny_model_dir)


def test_killed_in_the_middle_and_run_again_gives_the_same_table(tmp_path, drawn, tiny_model_dir, finished):
    code = (
        "import sys; from pathlib import Path\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_eval_pipeline_benchmark import KilledAt, evaluate\n"
        "if __name__ == '__main__':\n"
        f"    folders = Path({str(tmp_path)!r}), Path({str(drawn)!r}), Path({str(tiny_model_dir)!r})\n"
        "    evaluate(*folders, calls=KilledAt(6))\n"
    )
    script = tmp_path / "victim.py"
    script.write_text(code)
    assert subprocess.run([sys.executable, script], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    folder = make_run(tmp_path, drawn, tiny_model_dir).folder
    path = folder / "answers.jsonl"
    before = list(read_records(path))
    assert 3 <= len(before) <= 5
    with path.open("ab") as file:
        file.write(b'{"uid": "charades_sta:11", "state": "answ')
    calls: list[str] = []
    result = evaluate(tmp_path, drawn, tiny_model_dir, calls=calls)
    assert figures(result) == figures(finished[1])
    assert sorted(calls) == sorted({f"charades_sta:{i}" for i in range(12)} - set(before))
    answers = [
        {uid: r["response"] for uid, r in read_records(run / "answers.jsonl").items()}
        for run in (folder, make_run(finished[0], drawn, tiny_model_dir).folder)
    ]
    assert answers[0] == answers[1]


def test_stages_score_without_model_and_files_between(finished, drawn, tiny_model_dir):
    output, result = finished
    folder = Path(result["folder"])
    assert {"run.json", "items.jsonl", "answers.jsonl", "scores.jsonl", "result.json", "frames"} <= set(
        os.listdir(folder)
    )
    assert result["counts"]["n_expected"] == 3720
    assert result["counts"]["n_items"] == 12
    assert result["is_partial"]
    assert not result["comparable"]
    # Gold answers as responses: rescoring alone must give 100.
    answers = read_records(folder / "answers.jsonl")
    gold = {uid: item["sample"]["answer"] for uid, item in read_records(folder / "items.jsonl").items()}
    original = (folder / "answers.jsonl").read_bytes()
    try:
        for uid, answer in answers.items():
            start, end = json.loads(gold[uid]) if "[" in gold[uid] else json.loads(gold[uid])["time"]
            answer["response"] = f"The event happens in {start} - {end} seconds."
        (folder / "answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers.values()))

        def no_model():
            raise AssertionError("scoring needs no model")

        from rewards.router import RewardRouter

        with RewardRouter() as router:
            again = make_run(output, drawn, tiny_model_dir).run(no_model, router, "score")
        assert again["headline"]["mIoU"] == pytest.approx(100.0)
        assert again["counts"]["n_ok"] == 12
    finally:
        (folder / "answers.jsonl").write_bytes(original)
        evaluate(output, drawn, tiny_model_dir, stage="score")


def test_a_second_evaluation_of_the_folder_is_refused(finished, drawn, tiny_model_dir):
    folder = make_run(finished[0], drawn, tiny_model_dir).folder
    with FolderLock(folder), pytest.raises(FolderInUse, match="being written by process"):
        evaluate(finished[0], drawn, tiny_model_dir)


def test_broken_and_missing_clips_are_failed_items_in_the_denominator(tmp_path, drawn, tiny_model_dir):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(drawn, data)
    records = json.loads((data / "videomme" / "videomme.json").read_text())[:4]
    (data / records[0]["path"]).unlink()
    (data / records[1]["path"]).write_bytes(b"not a video")
    (data / "videomme" / "videomme.json").write_text(json.dumps(records))
    result = evaluate(tmp_path / "out", data, tiny_model_dir, name="videomme")
    assert result["counts"]["n_failed"] == 2
    assert result["counts"]["n_items"] == 4
    answers = read_records(Path(result["folder"]) / "answers.jsonl")
    failed = [answer for answer in answers.values() if answer["state"] == "failed"]
    assert {Path(records[i]["path"]).name in " ".join(a["reason"] for a in failed) for i in (0, 1)} == {True}


def test_settings_that_change_answers_are_another_run(tmp_path, drawn, tiny_model_dir):
    run = make_run(tmp_path, drawn, tiny_model_dir)
    keys = {run.key}
    for options in ({"seed": 1}, {"style": "cot"}, {"engine_key": {"dtype": "float16"}}):
        keys.add(make_run(tmp_path, drawn, tiny_model_dir, **options).key)
    keys.add(BenchmarkRun(replace(run.benchmark, version="2"), run.options, run.settings).key)
    keys.add(BenchmarkRun(run.benchmark, run.options, replace(run.settings, frame_policy="reference")).key)
    hot = replace(run.options, sampling=replace(run.options.sampling, temperature=0.5))
    keys.add(BenchmarkRun(run.benchmark, hot, run.settings).key)
    assert len(keys) == 7
    assert make_run(tmp_path / "elsewhere", drawn, tiny_model_dir, limit=3, processes=2).key == run.key


def test_slices_during_training_give_the_figures_of_the_command(tmp_path, drawn, tiny_model_dir, finished):
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from eval.slices import BenchmarkSlices, slice_metrics
    from rewards.router import RewardRouter
    from rollout.callback import resolve_sampling
    from rollout.engines.hf import HFEngine

    sampling = resolve_sampling(SamplingSpec(n=1, temperature=0.0, max_tokens=8), tiny_model_dir, Qwen3VLFamily())
    calls = {0: 0, 1: 0}
    rows: list = []
    barrier = threading.Barrier(2)

    def rank(number: int):
        engine = HFEngine(tiny_model_dir, Qwen3VLFamily())

        def generate(requests):
            calls[number] += 1
            yield from engine.generate(requests)

        def gather(own):
            rows.extend(own)
            barrier.wait(timeout=120)
            return list(rows)

        # 12 items in batches of 5: the ranks have 7 and 5 items and must call the engine equally often.
        slices = BenchmarkSlices(
            ["charades_sta"], str(drawn), str(tiny_model_dir), Qwen3VLFamily(), limit=12, batch_size=5, frames=FRAMES
        )
        with RewardRouter() as router:
            return slices.evaluate(generate, router, sampling, number, 2, gather)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rank, [0, 1]))
    assert calls == {0: 2, 1: 2}
    for found in both:
        ((summary, records),) = found
        assert dict(summary.headline) == finished[1]["headline"]
        assert {**summary.counts} == finished[1]["counts"]
        assert len(records) == 12
        assert slice_metrics(found)["eval/mean"] == summary.headline["mIoU"]
