"""The pool of killable processes: hostile judgements cost their own verdict only, and nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from rewards_helpers import Scripted

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


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_hostile_judgements_leave_the_others_intact(pool: ScoringPool) -> None:
    hostile = ["hang", "die", "grab", "raise"]
    answers = ["x"] * 100 + hostile + ["y"] * 100
    futures = [pool.submit("scripted", query(), answer, 3.0) for answer in answers]
    verdicts = [future.result(timeout=60) for future in futures]
    assert [v.accuracy for v in verdicts[:100]] == [1.0] * 100
    assert [v.accuracy for v in verdicts[104:]] == [0.0] * 100
    assert all(v.status == "ok" for v in [*verdicts[:100], *verdicts[104:]])
    assert [v.status for v in verdicts[100:104]] == ["timeout", "error", "error", "error"]
    reasons = [v.reason for v in verdicts[100:104]]
    assert "longer than 3 s" in reasons[0]
    assert "died" in reasons[1]
    assert "memory" in reasons[2]
    assert reasons[3] == "RuntimeError: on purpose"


def test_a_killed_worker_is_replaced() -> None:
    pool = ScoringPool({"scripted": Scripted()}, workers=1)
    first = pool.submit("scripted", query(), "x", 5.0).result(timeout=60)
    os.kill(int(first.parts["pid"]), signal.SIGKILL)
    assert gone([int(first.parts["pid"])])
    later = [pool.submit("scripted", query(), "x", 5.0).result(timeout=60) for _ in range(5)]
    pool.close()
    assert [verdict.accuracy for verdict in later] == [1.0] * 5
    assert {verdict.parts["pid"] for verdict in later}.isdisjoint({first.parts["pid"]})


def test_the_pool_works_from_any_thread(pool: ScoringPool) -> None:
    verdicts = []

    def ask() -> None:
        verdicts.append(pool.submit("scripted", query(), "x", 5.0).result(timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [v.accuracy for v in verdicts] == [1.0] * 8


def test_closing_ends_every_process_and_every_waiting_judgement() -> None:
    pool = ScoringPool({"scripted": Scripted()}, workers=1)
    pool.submit("scripted", query(), "x", 5.0).result(timeout=60)
    pids = pool.pids
    waiting = [pool.submit("scripted", query(), "hang", 60.0) for _ in range(3)]
    time.sleep(0.2)
    pool.close()
    assert [future.result(timeout=10).status for future in waiting] == ["error"] * 3
    assert gone(pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("scripted", query(), "x", 1.0)


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from rewards.base import Query
from rewards.tasks.code import Code
from rewards.pool import ScoringPool
from rewards_helpers import Scripted

pool = ScoringPool({{"code": Code(wall_s=60, cpu_s=60), "scripted": Scripted()}}, workers=2)
pool.submit("scripted", Query("", "x", "scripted"), "x", 60).result()
pool.submit("scripted", Query("", "x", "scripted"), "hang", 600)
pool.submit("code", Query("", "1", "code"), "import time\\ntime.sleep(600)", 600)
time.sleep(1.5)
print(" ".join(map(str, pool.pids)), flush=True)
time.sleep(600)
"""


def test_nothing_survives_a_parent_that_is_killed() -> None:
    """Workers and the sandboxed program below them end with a parent that gets no chance to clean up."""
    script = PARENT.format(tests=str(ROOT / "tests"))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    family = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert set(workers) <= set(family)
    assert len(family) >= 4  # two workers, the launcher of the sandbox, and the program in it
    parent.kill()
    parent.wait()
    assert gone(family)
    ScoringPool({}, workers=1).close()  # the next pool removes the folders that the killed one left
    assert not list(Path(tempfile.gettempdir()).glob(f"reward-pool-{parent.pid}-*"))


def test_math_that_never_ends_is_killed_in_its_limit() -> None:
    """Towers of powers keep sympy in C code, where no signal handler would run."""
    hostile = ["9^{9^{9^{9}}}", "(10^{8})!", "(x+y+z+w)^{3000}"]
    with RewardRouter({"math": MathAnswer(seconds=1.5)}, workers=2) as router:
        router.score(response="\\boxed{2}", ground_truth="x", problem_type="math")
        pending = [
            router.submit(response=f"\\boxed{{{text}}}", ground_truth="x^{50}", problem_type="math") for text in hostile
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
