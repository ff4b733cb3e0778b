"""Runs untrusted Python programs in isolation, with limits, and says what happened.

The strongest level that this system allows is chosen once per process: namespaces, else system-call filter and
Landlock. Where neither works programs are not run at all.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from rewards.sandbox.child import MARK, SETUP_FAILED

Level = Literal["namespaces", "filters"]
Outcome = Literal["ok", "crash", "timeout", "violation", "unavailable"]
_CHILD = Path(__file__).with_name("child.py")
_VIOLATIONS = (
    "PermissionError",
    "MemoryError",
    "BlockingIOError",
    "Read-only file system",
    "Errno 1]",
    "can't start new thread",
)


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 4.0
    """Seconds of wall clock."""
    cpu_s: int = 4
    """Seconds of processor time."""
    memory_mb: int = 512
    """Address space in MiB."""
    disk_mb: int = 16
    """Size of the writable folder and of each file in it, in MiB."""
    output_kb: int = 256
    """Captured standard output in KiB; a program that writes more is stopped."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "disk_mb", "output_kb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


@dataclass(frozen=True)
class Run:
    """How one program ended."""

    outcome: Outcome
    """ok: exit status 0; crash: the program's own failure; timeout: over wall or processor time; violation: it ran into
    the sandbox (memory, output, forbidden call); unavailable: not run."""
    stdout: str
    stderr: str
    reason: str = ""


def run_python(
    files: Mapping[str, str], stdin: str = "", limits: Limits | None = None, level: Level | None = None
) -> Run:
    """Run `files["main.py"]` beside the other files in a fresh folder that is deleted afterwards."""
    chosen = level or isolation_level()
    if chosen is None:
        return Run("unavailable", "", "", isolation_problem())
    return _run(files, stdin, limits or Limits(), chosen)


@lru_cache(maxsize=1)
def _probe() -> tuple[Level | None, str]:
    reasons = []
    for level in ("namespaces", "filters"):
        run = _run({"main.py": "print(6 * 7)"}, "", Limits(wall_s=20.0), level)
        if run.outcome == "ok" and run.stdout == "42\n":
            return level, ""
        reasons.append(f"{level}: {run.reason or run.stderr.strip()[-200:] or run.outcome}")
    return None, "this system allows no isolation of programs (" + "; ".join(reasons) + ")"


def isolation_level() -> Level | None:
    """The strongest level that works here, None when there is none."""
    return _probe()[0]


def isolation_problem() -> str:
    """Why there is no isolation; empty when there is."""
    return _probe()[1]


@lru_cache(maxsize=1)
def _interpreter() -> tuple[str, list[str]]:
    """The base interpreter (not the virtual environment's link) and the folders that it needs, outermost first."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    wanted = ["/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sysconfig.get_path("stdlib"), os.path.dirname(python)]
    folders: list[str] = []
    for folder in wanted:
        if not any(folder == known or folder.startswith(known.rstrip("/") + "/") for known in folders):
            folders.append(folder)
    return python, folders


def _run(files: Mapping[str, str], stdin: str, limits: Limits, level: Level) -> Run:
    python, folders = _interpreter()
    box = Path(tempfile.mkdtemp(prefix="reward-box-"))
    try:
        for name, text in files.items():
            (box / name).write_text(text, encoding="utf-8", errors="replace")
        root = box.with_name(box.name + "-root")
        root.mkdir()
        config = {
            "level": level,
            "parent": os.getpid(),
            "files": str(box),
            "root": str(root),
            "python": python,
            "folders": folders,
            "cpu_s": limits.cpu_s,
            "memory_mb": limits.memory_mb,
            "disk_mb": limits.disk_mb,
        }
        return _watch([sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(config)], stdin, limits)
    except OSError as error:
        return Run("unavailable", "", "", f"no process can be started: {error}")
    finally:
        shutil.rmtree(box, ignore_errors=True)
        shutil.rmtree(box.with_name(box.name + "-root"), ignore_errors=True)


def _watch(command: list[str], stdin: str, limits: Limits) -> Run:
    """Start the child in the caller's process group, feed and read it, and kill it when its time is over."""
    with tempfile.TemporaryFile() as source:
        source.write(stdin.encode("utf-8", errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}
        )
    try:
        stdout, stderr, stopped = _read(process, time.monotonic() + limits.wall_s, limits.output_kb << 10)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return _classify(process.returncode, stdout, stderr, stopped, limits)


def _read(process: subprocess.Popen[bytes], deadline: float, cap: int) -> tuple[str, str, str]:
    """Output of both pipes up to `cap` bytes, and why reading stopped ("", "timeout" or "output")."""
    chunks: dict[str, list[bytes]] = {"out": [], "err": []}
    sizes = {"out": 0, "err": 0}
    stopped = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "out")  # type: ignore[arg-type]
        selector.register(process.stderr, selectors.EVENT_READ, "err")  # type: ignore[arg-type]
        while selector.get_map() and not stopped:
            left = deadline - time.monotonic()
            events = selector.select(max(0.0, left)) if left > 0 else []
            if not events:
                stopped = "timeout"
            for key, _ in events:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                sizes[key.data] += len(data)
                if sizes[key.data] <= cap:
                    chunks[key.data].append(data)
                elif key.data == "out":
                    stopped = "output"
    if not stopped:
        try:
            process.wait(timeout=max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = "timeout"
    text = {name: b"".join(parts).decode("utf-8", errors="replace") for name, parts in chunks.items()}
    return text["out"], text["err"], stopped


def _classify(code: int, stdout: str, stderr: str, stopped: str, limits: Limits) -> Run:
    if stopped == "timeout":
        return Run("timeout", stdout, stderr, f"ran longer than {limits.wall_s:g} s")
    if stopped == "output":
        return Run("violation", stdout, stderr, f"wrote more than {limits.output_kb} KiB")
    if code == SETUP_FAILED and MARK in stderr:
        return Run("unavailable", "", stderr, stderr[stderr.index(MARK) :][:300])
    if code == 0:
        return Run("ok", stdout, stderr)
    last = stderr.strip().splitlines()[-1][:200] if stderr.strip() else ""
    by_signal = -code if code < 0 else code - 128
    if by_signal in (signal.SIGXCPU, signal.SIGKILL):
        return Run("timeout", stdout, stderr, f"used more than {limits.cpu_s} s of processor time")
    if by_signal == signal.SIGXFSZ or any(word in last for word in _VIOLATIONS):
        return Run("violation", stdout, stderr, f"stopped by the sandbox: {last or 'file too large'}")
    return Run("crash", stdout, stderr, last or f"exit status {code}")
