"""Filling the cache ahead of training: what training looks up, once per clip, with failures listed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from data_media import damage, noise, numbered_frames, write_video
from waiting import all_gone

from datamodules.preprocess import check_space, plan_work, record, run_local, run_ray
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache
from datamodules.video.maintenance import used_bytes
from datamodules.video_rl import VideoRLDataModule
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.launch import preprocess as script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def data(tmp_path):
    """Six records on four readable clips (one with another part), one broken and one missing file."""
    for i in range(3):
        write_video(tmp_path / f"{i}.mp4", numbered_frames(20 + i), fps=10)
    (tmp_path / "broken.mp4").write_bytes(b"\0" * 4000)
    videos = ["0.mp4", "1.mp4", "2.mp4", "0.mp4", {"path": "0.mp4", "start": 1.0}, "broken.mp4", "missing.mp4"]
    records = [
        {"problem": "?", "answer": "1", "problem_type": "numerical", "videos": [video], "problem_id": i}
        for i, video in enumerate(videos)
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


@pytest.fixture
def make(data, tiny_model_dir):
    def build(cache="cache", **options):
        module = VideoRLDataModule(
            str(tiny_model_dir),
            str(data / "d.jsonl"),
            family=Qwen3VLFamily(),
            media_root=str(data),
            cache_dir=str(data / cache),
            video_min_pixels=2048,
            prompt_templates="tiny",
            rollout_batch_size=7,
            **options,
        )
        module.setup()
        return module

    return build


def entries(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*/*.clip")}


def test_caches_once_what_training_looks_up_and_resumes(make, data):
    module = make()
    work = plan_work(module.train_samples, module.preparer)
    assert (work.num_references, len(work.jobs), work.num_cached) == (7, 4, 0)
    assert {failure.id for failure in work.failures} == {"d:5", "d:6"}
    lines = []
    stored, size, _ = record(work, run_local(work.jobs, module.cache, 1, 60), module.cache, lines.append, 0)
    assert stored == 4
    assert size == sum(path.stat().st_size for path in (data / "cache").glob("*/*.clip"))
    assert [line.split(",")[0] for line in lines] == [f"{i}/4 clips" for i in range(1, 5)]
    assert lines[-1].endswith("0:00:00 left")
    written = [json.loads(line) for line in (data / "cache" / "failures.jsonl").read_text().splitlines()]
    assert [(f["id"], f["path"]) for f in written] == [("d:5", "broken.mp4"), ("d:6", "missing.mp4")]
    assert all(f["reason"] for f in written)
    # Training now decodes nothing.
    only = make(source_mode="cache_only")
    (batch,) = only.train_dataloader()
    assert sorted(prompt.uid for prompt in batch.prompts) == ["d:0", "d:1", "d:2", "d:3", "d:4"]
    before = entries(data / "cache")
    again = plan_work(module.train_samples, module.preparer)
    assert (len(again.jobs), again.num_cached) == (0, 4)
    # Another spec is another set of clips.
    assert len(plan_work(module.train_samples, make(fps=1.0).preparer).jobs) == 4
    assert entries(data / "cache").keys() == before.keys()


def test_a_broken_video_is_quarantined_by_preprocessing(make, data):
    damage(write_video(data / "1.mp4", noise(40), fps=10))
    module = make()
    work = plan_work(module.train_samples, module.preparer)
    _, _, failures = record(work, run_local(work.jobs, module.cache, 1, 60), module.cache, lambda _: None)
    reasons = {failure.id: failure.reason for failure in failures}
    assert set(reasons) == {"d:1", "d:5", "d:6"}
    assert "1.mp4" in [entry["name"] for entry in module.cache.quarantine.entries()]
    again = plan_work(module.train_samples, module.preparer)
    assert {f.reason for f in again.failures if f.id == "d:1"} == {f"quarantined: {reasons['d:1']}"}


def test_space_is_checked_before_starting(make, data):
    module = make()
    work = plan_work(module.train_samples, module.preparer)
    # 4 frames (min_frames) of 64x96 for 2.0 s and the 1 s part, per clip
    assert [job.frame_bytes for job in work.jobs] == [4 * 3 * 64 * 96] * 4
    assert work.estimated_bytes("raw") == 16 * 3 * 64 * 96
    cache = VideoCache(data / "not" / "yet")
    assert check_space(cache, 10) > 10
    with pytest.raises(ValueError, match="GB are needed"):
        check_space(cache, 10**18)


@pytest.mark.parametrize("start", [0, 3, None], ids=["empty cache", "clips of another experiment", "temporary file"])
def test_the_limit_of_the_cache_binds_preprocessing_as_it_binds_training(make, data, start):
    """Also with clips that were used a moment ago, which are never evicted, and files that are being written."""
    limit = 12_000
    module = make(cache_max_gb=limit / 1e9)
    cache = module.cache
    for i in range(start or 0):
        cache.load(MediaRef(f"{i}.mp4"), replace(module.preparer.video_spec, max_frames=2, min_frames=2))
    if start is None:
        (data / "cache" / "ab").mkdir(parents=True)
        (data / "cache" / "ab" / ".x.clip.1.tmp").write_bytes(b"x" * 5_000)
    work = plan_work(module.train_samples, module.preparer)
    for job in work.jobs:  # as training fills it
        module.cache.load(job.ref, job.spec)
    trained = used_bytes(data / "cache")
    for path in (data / "cache").glob("*/*.clip"):
        path.unlink()
    assert 0 < trained <= limit
    results = list(run_local(work.jobs, cache, 1, 60))
    assert used_bytes(data / "cache") <= limit
    refused = [str(done.error) for done in results if done.error]
    assert refused
    assert all("cache_max_gb" in reason for reason in refused)
    assert not any(done.error.permanent for done in results if done.error)


def test_the_plan_compares_with_the_limit_of_the_cache(make, data):
    module = make(cache_max_gb=1e-4)
    cache = module.cache
    assert check_space(cache, 60_000) == 100_000
    assert check_space(cache, 60_000, kept=30_000) == 70_000
    with pytest.raises(ValueError, match=r"are needed in .*data\.cache_max_gb allows 0\.1 MB"):
        check_space(cache, 60_000, kept=50_000)
    work = plan_work(module.train_samples, make().preparer)
    assert work.cached_bytes == 0
    record(work, run_local(work.jobs, make().cache, 1, 60), cache, lambda _: None)
    again = plan_work(module.train_samples, module.preparer)
    assert again.cached_bytes == used_bytes(data / "cache") > 0


def test_killed_preprocessing_leaves_no_process_and_a_usable_cache(make, data):
    module = make(cache="killed")
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from datamodules.preprocess import *\nfrom datamodules.video_rl import VideoRLDataModule\n"
        "from lightning_modules.families.qwen3_vl import Qwen3VLFamily\n"
        f"m = VideoRLDataModule({module.model_path!r}, {str(data / 'd.jsonl')!r}, family=Qwen3VLFamily(),"
        f" media_root={str(data)!r},"
        f" cache_dir={str(data / 'killed')!r}, video_min_pixels=2048)\nm.setup()\n"
        "w = plan_work(m.train_samples, m.preparer)\n"
        "for done in run_local(w.jobs, m.cache, 1, 60): print('done', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "done\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGKILL)
    process.wait()
    all_gone(children)
    work = plan_work(module.train_samples, module.preparer)
    record(work, run_local(work.jobs, module.cache, 1, 60), module.cache, lambda _: None)
    assert plan_work(module.train_samples, module.preparer).num_cached == 4


def test_ray_on_two_nodes_gives_the_same_cache(make, data, monkeypatch):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    local, spread = make(cache="local"), make(cache="ray")
    work = plan_work(local.train_samples, local.preparer)
    record(work, run_local(work.jobs, local.cache, 1, 60), local.cache, lambda _: None)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        work = plan_work(spread.train_samples, spread.preparer)
        stored, _, failures = record(work, run_ray(work.jobs, spread.cache, None, 120), spread.cache, lambda _: None)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert stored == 4
    assert {failure.id for failure in failures} == {"d:5", "d:6"}
    for ref in (MediaRef("0.mp4"), MediaRef("1.mp4"), MediaRef("2.mp4"), MediaRef("0.mp4", start=1.0)):
        here, there = (module.cache.get(ref, module.preparer.video_spec) for module in (local, spread))
        np.testing.assert_array_equal(here.frames, there.frames)
        assert here.digest == there.digest


def test_the_script_reads_the_training_configuration(data, tiny_model_dir, capsys):
    command = [
        "experiment=tiny_cpu", f"model.path={tiny_model_dir}", f"data.train_files={data / 'd.jsonl'}",
        "data.val_files=[]", f"data.media_root={data}", f"data.cache_dir={data / 'cache'}",
    ]  # fmt: skip
    assert script.main([*command, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "7 video references, 4 readable clips, 0 cached, 4 to decode, 2 samples with unreadable videos" in out
    assert "unreadable: d:6 missing.mp4" in out
    assert "5 prompts measured, 2 unreadable" in out
    assert not list((data / "cache").glob("*/*.clip"))
    assert script.main([*command, "workers=1"]) == 0
    assert "stored 4 clips" in capsys.readouterr().out
    for option, message in (
        ("launcher=slurm", "launcher=slurm is unknown"),
        ("workers=many", "workers=many must be a number of processes from 1"),
        ("workers=0", "workers=0 must be"),
        ("dry_run=yes", "dry_run=yes must be true or false"),
    ):
        assert script.main([*command, option]) == 2
        assert message in capsys.readouterr().err
    damage(data / "1.mp4")
    assert script.main([*command, "workers=1"]) == 0
    assert "3 samples have videos that cannot be used" in capsys.readouterr().out
    assert script.main([*command, "list_quarantined=True"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 quarantined videos in ")
    assert re.search(r"^1\.mp4: .+", out, re.MULTILINE)
    assert script.main([*command, "retry_quarantined=true"]) == 0
    assert "1 quarantined videos are tried again" in capsys.readouterr().out
    assert script.main([*command, "data.max_frame=3"]) == 2
    assert "data.max_frames" in capsys.readouterr().err
