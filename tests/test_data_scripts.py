"""The data scripts run and say what they should."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_media import numbered_frames, write_video
from PIL import Image

from datamodules.video.cache import VideoCache

ROOT = Path(__file__).resolve().parents[1]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inspect_shows_what_the_model_sees(tmp_path, capsys, tiny_model_dir):
    script = load_script("inspect_cache")
    path = write_video(tmp_path / "v.mp4", numbered_frames(40), fps=10)
    assert script.main([str(path), f"out={tmp_path}", "min_pixels=1024", "max_pixels=10000"]) == 0
    out = capsys.readouterr().out
    assert "indices     0 6 11 17 22 28 33 39" in out
    assert "times (s)   0.3 1.4 2.5 3.6" in out
    assert "tokens      24 visual (6 per temporal patch)" in out
    sheet = np.asarray(Image.open(tmp_path / "v.png").convert("L"))
    assert sheet.shape == (14 + 107, 8 * 160)
    # The frames lie in order: grey levels 0, 30, 55, ...
    grey = [int(np.median(sheet[30:110, i * 160 + 20 : i * 160 + 140])) for i in range(8)]
    np.testing.assert_allclose(grey, [0, 30, 55, 85, 110, 140, 165, 195], atol=3)
    options = ["experiment=tiny_cpu", f"model.path={tiny_model_dir}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert script.main([str(path), f"out={tmp_path}", *options]) == 0
    assert "cached      no" in capsys.readouterr().out
    assert script.main([str(path), f"out={tmp_path}", *options]) == 0
    assert "cached      yes" in capsys.readouterr().out
    (entry,) = (tmp_path / "cache").glob("*/*.clip")
    assert script.main([str(entry), f"out={tmp_path}"]) == 0
    assert "lossless" in capsys.readouterr().out
    assert script.main([str(tmp_path / "absent.mp4")]) == 1
    assert script.main([str(path), "fsp=3"]) == 2
    assert VideoCache(None).folder is None


def run_bench(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["data", name, "--small"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_script("bench/data").main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_cache_benchmark_runs_small(monkeypatch, capsys, tmp_path):
    rows = run_bench("cache", monkeypatch, capsys, tmp_path)
    exact = {row["codec"]: row["exact"] for row in rows if "exact" in row}
    assert exact == {"raw": True, "lossless": True, "jpeg": False}
    sizes = {row["codec"]: row["worst_size_ratio"] for row in rows if row["case"] == "summary"}
    assert sizes["raw"] <= 0.26
    assert sizes["lossless"] <= 0.15


def test_lengths_benchmark_runs_small(monkeypatch, capsys, tmp_path):
    first, remembered, exact = run_bench("lengths", monkeypatch, capsys, tmp_path)
    assert exact == {"case": "exact", "equal": True, "checked": 1}
    assert first["samples"] == remembered["samples"] == 70
    assert first["tokens"] == remembered["tokens"]


@pytest.mark.slow
def test_decode_benchmark_runs_small(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "scripts/bench/data.py", "decode", "--small"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["decoder"] for row in rows} >= {"pyav", "torchcodec", "decord"}
    assert all(row["largest_difference_to_pyav"] <= 2 for row in rows if "seconds" in row)


@pytest.mark.slow
def test_cache_figures(shared_data):
    """The full recipe: five clips of ten minutes, 256 frames."""
    run = subprocess.run([sys.executable, "scripts/bench/data.py", "cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = {row["codec"]: row for row in map(json.loads, run.stdout.splitlines()) if row["case"] == "summary"}
    assert rows["lossless"]["worst_size_ratio"] <= 0.15
    assert rows["lossless"]["median_size_ratio"] <= 0.115
    assert rows["raw"]["worst_size_ratio"] <= 0.26


@pytest.mark.slow
def test_lengths_of_3500_samples_are_exact(shared_data):
    run = subprocess.run([sys.executable, "scripts/bench/data.py", "lengths"], cwd=ROOT, capture_output=True, text=True)
    rows = {row["case"]: row for row in map(json.loads, run.stdout.splitlines())}
    assert rows["exact"]["equal"]
    assert rows["first"]["tokens"] == rows["remembered"]["tokens"]
