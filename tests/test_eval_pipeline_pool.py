"""The preparation pool and the records: nothing is lost, whatever happens to a process or the disk."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from conftest import ROOT
from eval_latency import FakeDecoder
from waiting import all_gone, until

from datamodules.common.files import FolderInUse, FolderLock
from datamodules.types import Sample
from eval.run.pool import PreparePool, Task
from eval.run.records import RecordLog, model_identity, read_records, run_key


def sample(uid: str, problem: str = "fine") -> Sample:
    return Sample(uid, problem, "gold", "open-ended", "text")


def tasks(*problems: str) -> list[Task]:
    return [Task(f"u{i}", sample(f"u{i}", problem)) for i, problem in enumerate(problems)]


def run_pool(pool: PreparePool, items: list[Task]) -> dict[str, str]:
    found = {}
    for outcome in pool.run(items):
        if outcome is None:
            continue
        assert outcome.key not in found
        found[outcome.key] = outcome.reason or outcome.value.prompt_text
        pool.release(outcome.key)
    return found


def test_every_item_of_the_pool_has_one_outcome_and_says_why():
    problems = ["fine", "decoder raises", "decoder hangs", "decoder dies", "fine too", "fine as well"]
    pool = PreparePool(FakeDecoder(), processes=2, deadline_s=5.0)
    found = run_pool(pool, tasks(*problems))
    assert found == {
        "u0": "fine",
        "u1": "u1.mp4: damaged",
        "u2": "preparation took longer than 5 s and was stopped",
        "u3": "the preparation process died 2 times (exit code 7)",
        "u4": "fine too",
        "u5": "fine as well",
    }
    assert (pool.stats.killed, pool.stats.died) == (1, 2)


def test_prepared_bytes_stay_below_the_limit_and_a_huge_item_still_passes():
    # Items of 1000 bytes: three fit into 3500, and the first one teaches the size.
    pool = PreparePool(FakeDecoder(), processes=4, max_bytes=3500)
    waiting = []
    for outcome in pool.run(tasks(*["fine"] * 12)):
        if outcome is None:  # nothing more is ready: what the memory holds has been prepared
            for key in waiting:
                pool.release(key)
            waiting.clear()
            continue
        assert outcome.value.sample.extra["frames"].tolist() == [len(outcome.key)] * 1000
        waiting.append(outcome.key)
    assert pool.peak_bytes <= 4000
    assert len(run_pool(PreparePool(FakeDecoder(), processes=2, max_bytes=10), tasks("fine", "fine"))) == 2


def test_processes_started_before_the_work_do_it_and_end_without_work():
    others = children()  # of decoders that earlier tests of this process have left
    pool = PreparePool(FakeDecoder(), processes=3)
    pool.start(2)
    until(lambda: len(children() - others) == 2, "two processes")
    started = children() - others
    assert run_pool(pool, tasks("fine", "decoder dies")) == {
        "u0": "fine",
        "u1": "the preparation process died 2 times (exit code 7)",
    }
    all_gone(started)
    idle = PreparePool(FakeDecoder(), processes=2)
    idle.start()
    until(lambda: len(children() - others) == 2, "two processes")
    idle.close()
    assert not children() - others


def children() -> set[int]:
    """Worker processes of this one."""
    import psutil

    return {p.pid for p in psutil.Process().children() if "datamodules.common.worker" in p.cmdline()}


def broken_build():
    raise ValueError("no such tokenizer")


def test_a_pool_that_cannot_start_says_so():
    with pytest.raises(RuntimeError, match="preparation cannot start: ValueError: no such tokenizer"):
        list(PreparePool(broken_build, processes=1).run(tasks("fine")))


def test_hanging_processes_die_with_a_killed_evaluation(tmp_path):
    code = (
        "import sys, os, threading\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_eval_pipeline_pool import *\n"
        "from pathlib import Path\n"
        "from waiting import file_exists\n"
        "if __name__ == '__main__':\n"
        "    pool = PreparePool(FakeDecoder(), processes=1)\n"
        f"    items = tasks('decoder hangs {tmp_path}/begun')\n"
        "    threading.Thread(target=lambda: list(pool.run(items)), daemon=True).start()\n"
        f"    file_exists(Path('{tmp_path}/begun'))\n"
        "    print(*children(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    script = tmp_path / "victim.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=ROOT, timeout=240
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert pids, result.stderr
    all_gone(pids)


def test_half_a_line_is_cut_off_and_its_item_is_missing(tmp_path):
    path = tmp_path / "responses.jsonl"
    log = RecordLog(path)
    log.append({"uid": "a", "text": "\ud800 lone"}, {"uid": "b", "text": "old"})
    log.append({"uid": "b", "text": "new"})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"uid": "c", "te')
    again = RecordLog(path)
    assert {uid: record["text"] for uid, record in again.records.items()} == {"a": "\ud800 lone", "b": "new"}
    again.append({"uid": "c", "text": "whole"})
    again.close()
    assert list(read_records(path)) == ["a", "b", "c"]
    assert path.read_bytes().count(b"\n") == 4


def test_a_full_disk_keeps_records_and_writes_them_when_there_is_room(tmp_path):
    log = RecordLog(tmp_path / "r.jsonl")
    log.append({"uid": "a"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # The kernel refuses to let the file grow, in the middle of a line.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
        assert not log.append({"uid": "b", "text": "x" * 100})
        assert "r.jsonl" in log.problem
        assert (tmp_path / "r.jsonl").read_bytes() == b'{"uid": "a"}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert log.append({"uid": "c"})
    log.close()
    assert list(read_records(tmp_path / "r.jsonl")) == ["a", "b", "c"]


def test_two_evaluations_of_one_folder_the_second_is_told(tmp_path):
    with FolderLock(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()} on .*output_dir"):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_run_key_and_model_identity_follow_content(tmp_path):
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1}) != run_key({"a": 1, "b": 3})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1" * 100)
    before = model_identity(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert model_identity(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"2" * 100)
    assert model_identity(tmp_path) != before
