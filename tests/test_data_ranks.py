"""Data on two real ranks: the same list everywhere, whatever a node can see of the media."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from data_media import numbered_frames, write_video
from waiting import all_gone, until

ROOT = Path(__file__).resolve().parents[1]

RANK = """
import json, os, sys
import torch.distributed as dist
from datamodules.video_rl import VideoRLDataModule as Data
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
dist.init_process_group("gloo")
rank = dist.get_rank()
model, data = sys.argv[1:3]
# Rank 1 does not see the long video, so only rank 0 can find out that its prompt is too long.
module = Data(model, data + "/d.jsonl", family=Qwen3VLFamily(), media_root=data + ("/all" if rank == 0 else "/some"),
    video_min_pixels=2048, prompt_templates="tiny", rollout_batch_size=2, max_prompt_tokens=150, max_steps=3)
module.set_rank(rank, 2)
batches = [[p.uid for p in b.prompts] + [u for u, _ in b.lost] for b in module.train_dataloader()]
print(json.dumps({"samples": [s.uid for s in module.train_samples], "batches": batches}))
dist.destroy_process_group()
"""


def test_every_rank_drops_the_same_samples(tmp_path, tiny_model_dir):
    for folder, names in (("all", "abcl"), ("some", "abc")):
        (tmp_path / folder).mkdir()
        for name in names:
            write_video(tmp_path / folder / f"{name}.mp4", numbered_frames(400 if name == "l" else 20), fps=10)
    records = [
        {"problem": "?", "answer": "1", "problem_type": "numerical", "videos": [f"{name}.mp4"], "problem_id": name}
        for name in "albc"
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python",
        sys.executable, "-c", RANK, str(tiny_model_dir), str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=900)
    assert run.returncode == 0, run.stderr
    first, second = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert first["samples"] == second["samples"] == ["d:a", "d:b", "d:c"]
    # Three steps of two prompts: two passes over the three samples, every prompt on exactly one rank.
    served = [uid for a, b in zip(first["batches"], second["batches"], strict=True) for uid in a + b]
    assert sorted(served) == sorted(["d:a", "d:b", "d:c"] * 2)


LOADER = """
import sys, time
from datamodules.video_rl import VideoRLDataModule as Data
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
model, data, size = sys.argv[1:4]
module = Data(model, data + "/d.jsonl", family=Qwen3VLFamily(), media_root=data, video_min_pixels=2048,
    prompt_templates="tiny",
    rollout_batch_size=int(size), num_workers=1, max_steps=100000, decode_timeout_s=60, source_mode="decode")
for batch in module.train_dataloader():
    print("batch", flush=True)
    time.sleep(3600 if int(size) > 1 else 0)
"""


def at_rest(pids: list[int]) -> Callable[[], bool]:
    """Whether processes have used no processor time between twenty calls: they wait for somebody."""
    seen: list[float] = []

    def check() -> bool:
        seen.append(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))
        return len(seen) > 20 and seen[-1] == seen[-20]

    return check


@pytest.mark.parametrize("size", [1, 64], ids=["batches that are read", "a batch that fills the pipe"])
def test_killing_the_trainer_leaves_no_loader_and_no_decoder(tmp_path, tiny_model_dir, size):
    write_video(tmp_path / "a.mp4", numbered_frames(20), fps=10)
    record = {"problem": "?", "answer": "1", "problem_type": "numerical", "videos": ["a.mp4"]}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    command = [sys.executable, "-c", LOADER, str(tiny_model_dir), str(tmp_path), str(size)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "batch\n"
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 2  # a loader worker and its decoder
    if size > 1:
        until(at_rest(family), "a worker that has filled the pipe with batches that nobody reads")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    all_gone(family)
