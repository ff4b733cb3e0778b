"""The pool of killable processes: hostile judgements cost their own verdict only, and nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path

import psutil
import pytest
from rewards_helpers import VERDICTS, Broken, Says, SaysInProcess, Scripted, ShowsFields
from waiting import all_gone, file_exists, until

from rewards.base import Query
from rewards.pool import ScoringPool
from rewards.router import RewardRouter
from rewards.tasks.math_answer import MathAnswer

ROOT = Path(__file__).resolve().parents[1]


def query(gold: str = "x", **fields: object) -> Query:
    return Query("", gold, "scripted", fields=fields)


@pytest.fixture(scope="module")
def pool():
    pool = ScoringPool({"scripted": Scripted()}, workers=2, memory_mb=2048)
    yield pool
    pool.close()


def test_hostile_judgements_leave_the_others_intact(pool: ScoringPool) -> None:
    hostile = ["hang", "die", "grab", "raise"]
    answers = ["x"] * 100 + hostile + ["y"] * 100
    limits = [3.0 if answer == "hang" else 60.0 for answer in answers]
    futures = [pool.submit("scripted", query(), answer, s) for answer, s in zip(answers, limits, strict=True)]
    verdicts = [future.result(timeout=300) for future in futures]
    assert [v.accuracy for v in verdicts[:100]] == [1.0] * 100
    assert [v.accuracy for v in verdicts[104:]] == [0.0] * 100
    assert all(v.status == "ok" for v in [*verdicts[:100], *verdicts[104:]])
    assert [v.status for v in verdicts[100:104]] == ["timeout", "error", "error", "error"]
    reasons = [v.reason for v in verdicts[100:104]]
    assert "longer than 3 s" in reasons[0]
    assert "died" in reasons[1]
    assert "memory" in reasons[2]
    assert reasons[3] == "RuntimeError: on purpose"


def test_a_verdict_counts_the_same_in_a_process_and_inline() -> None:
    with RewardRouter({"inline": Says(), "process": SaysInProcess()}, workers=1) as router:
        for name in VERDICTS:
            inline, process = (
                router.score(response=f"<answer>{name}</answer>", ground_truth="x", problem_type=lane)
                for lane in ("inline", "process")
            )
            assert inline == process, name
    assert router.score(
        response="<answer>own reward</answer>", ground_truth="x", problem_type="inline"
    ).total == pytest.approx(0.1)


def test_values_of_a_record_reach_the_judgement_as_they_are() -> None:
    """Tuples stay tuples, keys keep their types; what is no value becomes text."""
    fields = {"pair": (1, 2.5), "by number": {1: "a"}, "nan": float("nan"), "day": date(2024, 1, 2)}
    with RewardRouter({"process": ShowsFields()}, workers=1) as router:
        score = router.score(response="<answer>x</answer>", ground_truth="x", problem_type="process", **fields)
    assert score.reason == "{'pair': (1, 2.5), 'by number': {1: 'a'}, 'nan': nan, 'day': '2024-01-02'}"


def test_a_task_that_cannot_start_is_named() -> None:
    pool = ScoringPool({"broken": Broken()}, workers=1)
    for _ in range(3):
        verdict = pool.submit("broken", query(), "x", 60.0).result(timeout=120)
        assert (verdict.status, verdict.accuracy) == ("error", 0.0)
        assert "could not be started: OSError: no such library" in verdict.reason
    pool.close()


def test_a_killed_worker_is_replaced() -> None:
    pool = ScoringPool({"scripted": Scripted()}, workers=1)
    first = pool.submit("scripted", query(), "x", 60.0).result(timeout=120)
    os.kill(int(first.parts["pid"]), signal.SIGKILL)
    all_gone([int(first.parts["pid"])])
    later = [pool.submit("scripted", query(), "x", 60.0).result(timeout=120) for _ in range(5)]
    pool.close()
    assert [verdict.accuracy for verdict in later] == [1.0] * 5
    assert {verdict.parts["pid"] for verdict in later}.isdisjoint({first.parts["pid"]})


def test_the_pool_works_from_any_thread(pool: ScoringPool) -> None:
    verdicts = []

    def ask() -> None:
        verdicts.append(pool.submit("scripted", query(), "x", 60.0).result(timeout=120))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [v.accuracy for v in verdicts] == [1.0] * 8


def test_closing_ends_every_process_and_every_waiting_judgement(tmp_path: Path) -> None:
    pool = ScoringPool({"scripted": Scripted()}, workers=1)
    pool.submit("scripted", query(), "x", 60.0).result(timeout=120)
    pids = pool.pids
    waiting = [pool.submit("scripted", query(), f"hang {tmp_path}/begun", 600.0) for _ in range(3)]
    file_exists(tmp_path / "begun")
    pool.close()
    assert [future.result(timeout=60).status for future in waiting] == ["error"] * 3
    all_gone(pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("scripted", query(), "x", 1.0)


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from waiting import until
from rewards.base import Query
from rewards.tasks.code import Code
from rewards.pool import ScoringPool
from rewards_helpers import VERDICTS, Broken, Says, SaysInProcess, Scripted, ShowsFields

pool = ScoringPool({{"code": Code(wall_s=60, cpu_s=60), "scripted": Scripted()}}, workers=2)
pool.submit("scripted", Query("", "x", "scripted"), "x", 60).result()
pool.submit("scripted", Query("", "x", "scripted"), "hang", 600)
pool.submit("code", Query("", "1", "code"), "import time\\ntime.sleep(600)", 600)
until(lambda: len(pool.pids) == 2, "two workers")
print(" ".join(map(str, pool.pids)), flush=True)
time.sleep(600)
"""


def test_nothing_survives_a_parent_that_is_killed() -> None:
    """Workers and the sandboxed program below them end with a parent that gets no chance to clean up."""
    script = PARENT.format(tests=str(ROOT / "tests"))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]

    def family() -> list[int]:
        return [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]

    until(lambda: len(family()) >= 4, "two workers, the launcher of the sandbox, and the program in it")
    below = family()
    assert set(workers) <= set(below)
    parent.kill()
    parent.wait()
    all_gone(below)
    ScoringPool({}, workers=1).close()  # the next pool removes the folders that the killed one left
    assert not list(Path(tempfile.gettempdir()).glob(f"worker-{parent.pid}-*"))


def test_math_that_never_ends_is_killed_in_its_limit() -> None:
    """Towers of powers keep sympy in C code, where no signal handler would run."""
    hostile = ["9^{9^{9^{9}}}", "(10^{8})!", "(x+y+z+w)^{3000}"]
    routes = {"math": MathAnswer(seconds=60.0), "hasty": MathAnswer(seconds=1.5)}
    with RewardRouter(routes, workers=2) as router:
        pending = [
            router.submit(response=f"\\boxed{{{text}}}", ground_truth="x^{50}", problem_type="hasty")
            for text in hostile
        ]
        record = {"ground_truth": "7\\sqrt{2}", "problem_type": "math"}
        others = [router.submit(response="\\boxed{\\sqrt{98}}", **record) for _ in range(40)]
        assert [future.result().accuracy for future in others] == [1.0] * 40
        assert [future.result().status for future in pending] == ["timeout"] * 3


def test_scoring_uses_no_alarm_signal() -> None:
    before = signal.getsignal(signal.SIGALRM)
    MathAnswer().judge(Query("", "x+1", "math"), "\\boxed{1+x}")
    assert signal.getsignal(signal.SIGALRM) is before
    assert not [path for path in (ROOT / "rewards").rglob("*.py") if "signal.alarm" in path.read_text()]
