"""Run `train.py` as a user does and read what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from conftest import ROOT
from waiting import GENEROUS_S, all_gone, until

IGNORED = ("time/", "rollout/tokens_per_second", "val/seconds", "reward/seconds", "sync/seconds")
"""Wall-clock metrics; everything else must not depend on when a run was stopped."""


def command(*overrides: str, script: str = "train.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *overrides]


def environment() -> dict[str, str]:
    # The stage variable runs one process of the experiment instead of all its stages.
    return {**os.environ, "EVR1_STAGE": "test", "PYTHONUNBUFFERED": "1"}


def run(
    *overrides: str, script: str = "train.py", timeout_s: float = 900, check: int | None = 0, torchrun: int = 0
) -> str:
    """Run to the end; returns the output. `check` is the exit code expected (None = any).

    With `torchrun`, that many ranks are started from outside, as on several nodes.
    """
    argv = command(*overrides, script=script)
    env = environment()
    if torchrun:
        del env["EVR1_STAGE"]  # a rank that somebody launched is never a pipeline
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
        argv = [argv[0], *launcher, *argv[1:]]
    result = subprocess.run(
        argv,
        cwd=ROOT,
        env=env,
        text=True,
        timeout=timeout_s,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert check is None or result.returncode == check, f"exit {result.returncode}\n{result.stdout[-6000:]}"
    return result.stdout


def start(log: Path, *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(*overrides),
        cwd=ROOT,
        env=environment(),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int, log: Path, timeout_s: float = 900) -> None:
    """Block until the run has logged `step`."""
    until(
        lambda: max(steps(run_dir), default=0) >= step or process.poll() is not None,
        f"step {step}, see {log}",
        timeout_s,
    )
    assert process.poll() is None, f"the run ended before step {step}:\n{log.read_text()[-6000:]}"


def stop(process: subprocess.Popen, signum: int, timeout_s: float = GENEROUS_S) -> int:
    """Send a signal to the first process only, as a shell's kill does, and make sure that nothing stays behind."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signum)
    code = process.wait(timeout=timeout_s)
    all_gone(family)
    return code


def rows(run_dir: Path) -> dict[int, dict[str, str]]:
    """metrics.csv by step, without wall-clock columns."""
    path = run_dir / "metrics.csv"
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        table = [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit()]
    return {
        int(row["step"]): {k: v for k, v in row.items() if k and v not in ("", None) and not k.startswith(IGNORED)}
        for row in table
    }


def steps(run_dir: Path) -> list[int]:
    return list(rows(run_dir))


def rollouts(run_dir: Path) -> dict[str, list[dict]]:
    """Rollout tables by file name."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run_dir / "rollouts").glob("*.jsonl"))
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Same steps, scalars and tokens."""
    left, right = rows(one), rows(other)
    assert list(left) == list(right)
    for step in left:
        different = {k: (v, right[step].get(k)) for k, v in left[step].items() if right[step].get(k) != v}
        assert different == {}, f"step {step} differs: {different}"
    assert rollouts(one) == rollouts(other)


SIGINT, SIGTERM, SIGKILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
