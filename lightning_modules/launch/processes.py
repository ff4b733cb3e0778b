"""Start, watch and stop the processes of a run, so that none is ever left behind.

Two rules: a child dies with its parent, however the parent dies (the kernel sends SIGKILL), and the first Ctrl-C is
passed on as a polite request while the second one ends the whole tree.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
INTERRUPTED = 130
"""Exit code of a run that was stopped by the user, as shells have it."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere a no-op)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended between the two calls
        os._exit(1)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    import psutil

    try:
        process = psutil.Process(pid)
        victims = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue


class ChildRun:
    """Run one child process to its end, forwarding the user's signals.

    Args:
        command: argument vector.
        env: environment of the child; None = ours.
        through_launcher: the child is a launcher (torchrun) whose children are the ranks; requests go to the ranks.
    """

    def __init__(
        self, command: Sequence[str], env: dict[str, str] | None = None, through_launcher: bool = False
    ) -> None:
        self._command = list(command)
        self._env = env
        self._through_launcher = through_launcher
        self._requests = 0

    def wait(self) -> int:
        """Return the child's exit code; INTERRUPTED when the user's second signal ended it."""
        # An own session: the terminal's Ctrl-C reaches only us, and we decide who is told.
        process = subprocess.Popen(self._command, env=self._env, start_new_session=True, preexec_fn=die_with_parent)
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        told = 0
        try:
            while process.poll() is None:
                if self._requests > told:
                    told += 1
                    self._forward(process, told)
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        return INTERRUPTED if self._requests > 1 else process.returncode

    @property
    def was_interrupted(self) -> bool:
        """Whether the user asked to stop while the child ran."""
        return self._requests > 0

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requests += 1

    def _forward(self, process: subprocess.Popen, told: int) -> None:
        import psutil

        if told > 1:
            log.warning("second request to stop: ending all processes at once")
            kill_tree(process.pid)
            return
        targets = [process.pid]
        if self._through_launcher:
            targets = [child.pid for child in psutil.Process(process.pid).children()] or targets
        for pid in targets:
            try:
                os.kill(pid, signal.SIGINT)
            except ProcessLookupError:
                continue


def torchrun_command(script: Path, arguments: Sequence[str], nproc: int) -> list[str]:
    """Argument vector that starts `script` in `nproc` local ranks."""
    return [
        sys.executable,
        "-m",
        "lightning_modules.launch.elastic",
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={nproc}",
        str(script),
        *arguments,
    ]


def in_launched_rank() -> bool:
    """Whether torchrun, SLURM's srun or Ray already started this process as one rank of a job."""
    if "LOCAL_RANK" in os.environ and "RANK" in os.environ:
        return True
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def wait_until(condition, timeout_s: float, poll_s: float = 0.05) -> bool:
    """Poll `condition()` until it holds or `timeout_s` seconds have passed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(poll_s)
    return bool(condition())
