"""The same program with another strategy, another engine, and a user's own records."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
from test_train_survival import arguments
from train_helpers import rollouts, rows, run

CLIPS = {"8670554760.mp4": "stvg_8670554760.mp4", "3843663025.mp4": "svg_3843663025.mp4"}
"""Names in the annotation file -> names of the clips at hand."""


@pytest.fixture(scope="module")
def vllm_run(tiny_assets, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("vllm") / "run"
    run(*arguments(tiny_assets, run_dir, "max_steps=2"))
    return run_dir


def evaluation(run_dir, step):
    return json.loads((run_dir / "evaluation" / f"step_{step:06d}.json").read_text())


def test_replicated_ranks_started_by_torchrun_equal_one_rank(tiny_assets, vllm_run, tmp_path):
    two_ranks = ("strategy=ddp", "trainer.devices=2")
    run(*arguments(tiny_assets, tmp_path / "run", "max_steps=2", *two_ranks), torchrun=2)
    alone, two = rows(vllm_run), rows(tmp_path / "run")
    for step in (1, 2):
        for name, tolerance in (("losses/policy", 1e-5), ("train/grad_norm", 1e-4), ("reward/total", 1e-6)):
            assert float(two[step][name]) == pytest.approx(float(alone[step][name]), rel=tolerance, abs=tolerance)
    # Rank 0 tabulates its own half of the same groups: same prompts, same tokens.
    first = {(r["uid"], r["k"]): r["response"] for r in rollouts(vllm_run)["step_000000.jsonl"]}
    again = {(r["uid"], r["k"]): r["response"] for r in rollouts(tmp_path / "run")["step_000000.jsonl"]}
    assert first == again


def test_transformers_generates_what_vllm_generates_greedily(tiny_assets, vllm_run, tmp_path):
    run(*arguments(tiny_assets, tmp_path / "run", "max_steps=1", "rollout=hf"))
    mine, theirs = evaluation(tmp_path / "run", 0)["records"], evaluation(vllm_run, 0)["records"]
    assert [r["response"] for r in mine] == [r["response"] for r in theirs]
    assert rows(tmp_path / "run")[1]["rollout/responses_count"] == "32.0"


def test_tensorboard_and_csv_hold_the_same_scalars(vllm_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(vllm_run / "tensorboard"))
    events.Reload()
    logged = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    with (vllm_run / "metrics.csv").open(newline="") as file:
        table = {
            (name, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if name != "step" and value
        }
    assert {key for key in logged if key[0] not in ("epoch", "hp_metric")} == set(table)
    for key, value in table.items():
        assert logged[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


def annotations(shared_data, name):
    return json.loads(gzip.decompress((shared_data / "eval" / "annotations" / f"{name}.json.gz").read_bytes()))


def charades_records(shared_data):
    for record in annotations(shared_data, "charades_sta"):
        if (shared_data / "videos" / record["path"]).is_file():
            # This annotation file hides its gold in a JSON object before a foreign token.
            gold = json.loads(record["solution"].split("<think>")[1].split("</think>")[0])["time"]
            yield {**record, "solution": f"<answer>{json.dumps(gold)}</answer>"}


def vidstg_records(shared_data):
    for record in annotations(shared_data, "stvg"):
        if record["path"] in CLIPS:
            yield {**record, "path": CLIPS[record["path"]]}


def test_real_clips_and_records_of_a_user(tiny_assets, shared_data, tmp_path):
    records = [*charades_records(shared_data), *vidstg_records(shared_data)]
    assert len(records) == 22
    (tmp_path / "broken.mp4").write_bytes(b"not a video" * 100)
    records += [
        {**records[0], "problem_id": "gone", "path": "missing.mp4"},
        {**records[0], "problem_id": "broken", "path": str(tmp_path / "broken.mp4")},
    ]
    (tmp_path / "mine.json").write_text(json.dumps(records))
    own = (
        f"data.train_files={tmp_path / 'mine.json'}",
        f"data.media_root={shared_data / 'videos'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.rollout_batch_size=24",
        "data.val_files=[]",
    )
    command = [o for o in arguments(tiny_assets, tmp_path / "run", "max_steps=1") if "rollout_batch_size" not in o]
    output = run(*command, *own)
    row = rows(tmp_path / "run")[1]
    assert float(row["data/lost_count"]) == 2
    assert "missing.mp4" in output
    assert "broken.mp4" in output
    assert float(row["rollout/responses_count"]) == 22 * 4
    # Both kinds of question were scored by interval and box overlap.
    types = {name.split("/")[1] for name in row if name.startswith("reward/") and name.count("/") == 2}
    assert {"temporal_grounding", "spatial_temporal_grounding"} <= types
    # Four clips answer 22 questions: each is in the cache once.
    assert len(list((tmp_path / "cache").rglob("*.clip"))) == 4
