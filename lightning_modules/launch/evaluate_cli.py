"""What `evaluate.py` does with its command line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from datamodules.common.places import add_config_dirs
from datamodules.common.processes import die_with_parent
from lightning_modules.launch.config import ConfigError, compose, nearest, split_flags, use_config_dirs
from lightning_modules.launch.console import configure_logging
from lightning_modules.launch.processes import INTERRUPTED, in_stage

log = logging.getLogger("evaluate")

HELP = """usage: python evaluate.py model=PATH benchmark=[NAME,...] data_root=DIR [key=value ...]
       python evaluate.py list [data_root=DIR]
       python evaluate.py run=RUN_DIR
       evr1-evaluate ...  the same where the project is installed as a package

  model=PATH        Hugging Face folder or hub name, the folder of a training run, or RUN_DIR/checkpoints/step_N
  benchmark=NAMES   one, a list, or all; the same command again continues where it was stopped
  data_root=DIR     one folder per benchmark, as downloaded
  config_dir=DIR    your own folder of options and Python files; its benchmark/NAME.yaml are benchmarks, too
  stage=score       score the answers again, without a model; other keys: conf/evaluate.yaml
  list              the benchmarks with counts, metric and the state of their data
  run=RUN_DIR       answer the run's held-out split greedily with its newest checkpoint and print accuracy per task
"""

RENAMED = {"model": "model_path", "benchmark": "benchmarks"}
"""Short names on the command line -> keys of conf/evaluate.yaml; `model` is a group of the training configuration."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if in_stage():
        die_with_parent()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging()
    add_config_dirs(())
    if not arguments or set(arguments) & {"-h", "--help", "help"}:
        sys.stdout.write(HELP)
        return 0 if arguments else 2
    try:
        flags, options = split_flags(arguments)
        return _run([*options, *flags])
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        log.warning("stopped; the same command again continues")
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments[0] == "list":
        from lightning_modules.launch.benchmarks import print_list

        options = _options(arguments[1:], ["data_root", "config_dir"])
        if "config_dir" in options:
            use_config_dirs([options["config_dir"]])
        return print_list(options.get("data_root"))
    keys = [argument.partition("=")[0] for argument in arguments]
    if "run" in keys:
        from lightning_modules.launch.held_out import evaluate_run

        evaluate_run(Path(_options(arguments, ["run"])["run"]))  # with the config_dir that the run was trained with
        return 0
    if bare := [argument for argument in arguments if "=" not in argument]:
        raise ConfigError(f"unknown command '{bare[0]}'{nearest(bare[0], ['list', 'model=', 'benchmark=', 'run='])}")
    parts = (argument.partition("=") for argument in arguments)
    config = compose("evaluate", [f"{RENAMED.get(key, key)}={value}" for key, _, value in parts])
    for key, name in (("model", "model_path"), ("benchmark", "benchmarks")):
        if config[name] is None:
            raise ConfigError(f"{key} is not set: add {key}=... to the command line")
    from lightning_modules.launch.benchmarks import evaluate_benchmarks

    return evaluate_benchmarks(config)


def _options(arguments: Sequence[str], known: list[str]) -> dict[str, str]:
    options = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"unknown option '{unknown[0]}'{nearest(unknown[0], known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
