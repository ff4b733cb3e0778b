"""Start, watch and stop the processes of a run, so that none is ever left behind.

Two rules: a child dies with its parent, however the parent dies (the kernel sends SIGKILL), and the first Ctrl-C is
passed on as a polite request while the second one ends the whole tree.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

from datamodules.common.processes import die_with_parent
from lightning_modules.launch.config import ConfigError

log = logging.getLogger("pipeline")

INTERRUPTED = 130
"""Exit code of a run that was stopped by the user, as shells have it."""
STAGE_ENV = "EVR1_STAGE"
"""Set in the processes of a pipeline; holds "2/5" and keeps a stage from starting the pipeline again."""


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


def launch_ranks(module: str, arguments: Sequence[str], nproc: int, environment: dict[str, str]) -> int:
    """Run a Python module in `nproc` local ranks under torchrun; the exit code of the first rank that failed."""
    # torchrun sets one thread with a warning when this is absent; each rank sets its real number itself.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={nproc}", "-m", module]
    command = [sys.executable, "-m", "lightning_modules.launch.processes", *options, *arguments]
    return ChildRun(command, environment, through_launcher=True).wait()


def _torchrun() -> int:
    """torchrun whose failure is the rank's own message, not a second traceback of the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def in_launched_rank() -> bool:
    """Whether torchrun, SLURM's srun or Ray already started this process as one rank of a job."""
    if "LOCAL_RANK" in os.environ and "RANK" in os.environ:
        return True
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


@dataclass(frozen=True)
class Stage:
    """One step of an experiment, run as `python -m module overrides`."""

    name: str
    """Shown to the user."""
    module: str
    """Python module with the program; the user's own may lie in their `config_dir`."""
    overrides: tuple[str, ...] = ()
    """Its command-line arguments."""
    inherit: bool = False
    """Whether the user's own overrides are passed on, in front of `overrides`."""


def parse_stages(items: Iterable[Mapping[str, Any]]) -> list[Stage]:
    """Stages of a config's `stages` list.

    Raises:
        ConfigError: an entry has an unknown field or a module that does not exist.
    """
    stages = []
    for item in items:
        try:
            stage = Stage(**{**item, "overrides": tuple(item.get("overrides", ()))})
        except TypeError as error:
            wanted = ", ".join(field.name for field in fields(Stage))
            raise ConfigError(f"stages: {item} is not a stage, whose fields are {wanted} ({error})") from error
        try:
            found = importlib.util.find_spec(stage.module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ConfigError(f"stages: module {stage.module} of stage {stage.name!r} does not exist")
        stages.append(stage)
    return stages


def run_pipeline(stages: Sequence[Stage], user_overrides: Sequence[str]) -> int:
    """Run the stages one after the other, each in a process of its own, as one story on the console.

    The first one that fails or is stopped ends the pipeline with its exit code.
    """
    for number, stage in enumerate(stages, 1):
        label = f"{number}/{len(stages)}"
        log.info("[%s] %s", label, stage.name)
        started = time.monotonic()
        overrides = [*(user_overrides if stage.inherit else ()), *stage.overrides]
        child = ChildRun([sys.executable, "-m", stage.module, *overrides], env={**os.environ, STAGE_ENV: label})
        code = child.wait()
        if code != 0:
            if code == INTERRUPTED or child.was_interrupted:
                log.info("[%s] stopped; the same command continues here", label)
                return INTERRUPTED
            log.error("[%s] %s failed with exit code %d", label, stage.name, code)
            return code
        log.info("[%s] done in %.0f s", label, time.monotonic() - started)
    return 0


def in_stage() -> bool:
    """Whether this process is a stage of a pipeline."""
    return STAGE_ENV in os.environ


if __name__ == "__main__":
    sys.exit(_torchrun())
