"""What `train.py` does with its command line; errors of the user become one line and exit code 2."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.common.places import add_config_dirs
from datamodules.common.processes import die_with_parent
from lightning_modules.launch.config import ConfigError, compose, expand_sweep, require_values, split_flags
from lightning_modules.launch.console import configure_logging, export_rank_environment, is_rank_zero, next_steps
from lightning_modules.launch.identity import default_run_dir
from lightning_modules.launch.plan import RunPlan, lock_run, plan_run
from lightning_modules.launch.processes import (
    INTERRUPTED,
    in_launched_rank,
    in_stage,
    launch_ranks,
    parse_stages,
    run_pipeline,
)
from lightning_modules.launch.ranks import PLAN_ENV, inherited_plan, plan_to_json, share_plan
from lightning_modules.state.run_folder import read_status, write_status
from lightning_modules.state.stop_flag import remember_interrupt

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("train")
MODULE = "lightning_modules.launch.cli"
"""What ranks, sweeps and stages start; named in full because this file itself may run as __main__."""

HELP = """usage: python train.py [-m] [--cfg] experiment=NAME [group=option ...] [key=value ...]
       evr1-train ...        the same where the project is installed as a package

  experiment=tiny_cpu        the laptop demo: tiny Qwen3-VL, real videos, real vLLM, GRPO
  experiment=qwen3vl_8b      the 4 x 8 H200 run; preflight=only prints its plan
  strategy=single|ddp|fsdp   trainer.devices=N   rollout=vllm|hf   algorithm=...   resume=auto|never|PATH
  config_dir=DIR             your own folder of options and Python files, of the shape of conf/
  -m                         one run per combination of comma-separated values
  --cfg                      print the resolved configuration and leave
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if in_stage() or in_launched_rank():
        die_with_parent()
    # Threads that spin at barriers starve the loader's and the engine's processes on a machine with few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    export_rank_environment()
    configure_logging()
    add_config_dirs(())
    flags, overrides = split_flags(sys.argv[1:] if arguments is None else arguments)
    unknown = flags - {"-m", "--multirun", "--cfg", "-h", "--help"}
    try:
        if unknown:
            raise ConfigError(f"unknown flag {sorted(unknown)[0]}; see python train.py --help")
        if flags & {"-h", "--help"}:
            sys.stdout.write(HELP)
            return 0
        if flags & {"-m", "--multirun"}:
            return _sweep(overrides)
        config = compose("train", overrides)
        if "--cfg" in flags:
            from omegaconf import OmegaConf

            sys.stdout.write(OmegaConf.to_yaml(config, resolve=True))
            return 0
        return _run(config, overrides)
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        log.info("stopped before training; nothing was changed, the same command starts again")
        return INTERRUPTED


def _sweep(overrides: list[str]) -> int:
    worst = 0
    for combination in own_folders(expand_sweep(overrides)):
        log.info("sweep: %s", " ".join(combination))
        worst = max(worst, subprocess.run([sys.executable, "-m", MODULE, *combination], check=False).returncode)
    return worst


def own_folders(combinations: list[list[str]]) -> list[list[str]]:
    """The combinations of a sweep; those that would share a run folder get one each, named after what differs."""
    configs = [compose("train", combination) for combination in combinations]
    folders = [Path(config.run_dir or default_run_dir(config)) for config in configs]
    result = []
    for combination, config, folder in zip(combinations, configs, folders, strict=True):
        others = [c for c, f in zip(combinations, folders, strict=True) if f == folder and c is not combination]
        varied = [override for override in combination if any(override not in other for other in others)]
        name = re.sub(r"[^\w.]+", "-", "-".join([folder.name, *varied])).strip("-")
        own = f"run_dir='{folder.with_name(name)}'" if config.run_dir else f"run_name={name}"
        result.append([*combination, own] if varied else combination)
    return result


def _run(config: DictConfig, overrides: list[str]) -> int:
    # These load torch and Lightning, which help and mistakes in the command line do not wait for.
    from lightning_modules.launch.preflight import check, print_plan
    from lightning_modules.launch.training import prepare_run_folder

    if config.preflight == "only":
        return print_plan(config)
    require_values(config)
    alone = not in_stage() and not in_launched_rank()
    plan = _decide(config)
    config.run_dir = str(plan.run_dir)
    # Read after the folder is decided: stages may name it (`run=${run_dir}`).
    stages = parse_stages(config.stages) if config.stages and alone else []
    first = is_rank_zero() and PLAN_ENV not in os.environ
    if config.preflight != "off" and first:
        check(config)
    if stages:
        # Every stage works on the folder decided here, whatever it would decide later.
        return _finish(plan, run_pipeline(stages, [*overrides, f"run_dir={plan.run_dir}"]))
    if plan.start_step >= int(config.max_steps):
        log.info("%s is complete at step %d (resume=never trains anew)", plan.run_dir, plan.start_step)
        _restore_export(config, plan)
        return 0
    if first:
        lock_run(plan.run_dir)
        prepare_run_folder(config, plan)
        log.info("%s", plan.note)
    if int(config.trainer.devices) > 1 and not in_launched_rank():
        code = launch_ranks(MODULE, overrides, int(config.trainer.devices), {PLAN_ENV: plan_to_json(plan)})
        stopped = code == 0 and read_status(plan.run_dir).get("state") == "stopped"
        return _finish(plan, INTERRUPTED if stopped else code)
    return _train(config, plan)


def _restore_export(config: DictConfig, plan: RunPlan) -> None:
    """Write the model a complete run was to leave behind, if somebody deleted it since."""
    target = config.module.get("export_to")
    if target and plan.checkpoint and not (Path(target) / "config.json").is_file() and is_rank_zero():
        from lightning_modules.launch.runs import export_run

        export_run(plan.checkpoint.parents[1], plan.start_step, target=Path(target))


def _decide(config: DictConfig) -> RunPlan:
    """The run folder and checkpoint, the same on every rank."""
    inherited = inherited_plan()
    if inherited is not None:
        return inherited
    if not in_launched_rank():
        return plan_run(config)
    return share_plan(plan_run(config) if is_rank_zero() else None)


def _train(config: DictConfig, plan: RunPlan) -> int:
    from lightning_modules.launch.training import run_training

    configure_logging(plan.run_dir)
    if threading.current_thread() is threading.main_thread():
        remember_interrupt()
    try:
        code = run_training(config, plan)
    except KeyboardInterrupt:
        log.info("stopped before the first step boundary; nothing new to save")
        return INTERRUPTED
    except ConfigError as error:
        write_status(plan.run_dir, "failed", error=f"{type(error).__name__}: {error}")
        raise
    except Exception as error:
        # The trust boundary of a whole run: record the reason in the run folder, then let the traceback be seen.
        write_status(plan.run_dir, "failed", error=f"{type(error).__name__}: {error}")
        raise
    return code if in_launched_rank() else _finish(plan, code)


def _finish(plan: RunPlan, code: int) -> int:
    if not in_stage():
        log.info("%s", next_steps(plan.run_dir, read_status(plan.run_dir)))
    return code


if __name__ == "__main__":
    sys.exit(main())
