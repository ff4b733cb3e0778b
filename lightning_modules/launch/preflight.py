"""Check a configuration before anything heavy starts, and print the plan of a run.

`check` raises one `ConfigError` that lists every problem with its value and its fix. `print_plan` is
`preflight=only`: it loads no model and works on a machine without GPUs, where the missing ones are listed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from huggingface_hub import try_to_load_from_cache
from hydra.utils import get_class, get_object
from omegaconf import DictConfig, OmegaConf

from lightning_modules.launch.config import ConfigError, build, refuse, to_plain
from lightning_modules.launch.memory import memory_plan
from lightning_modules.launch.plan import plan_run
from lightning_modules.layouts.base import Layout
from lightning_modules.modules.sft import SFTLightningModule
from lightning_modules.strategies.base import PolicyStrategy
from rollout.callback import ColocatedEngineCallback

if TYPE_CHECKING:
    from lightning_modules.algorithms.base import Algorithm
    from lightning_modules.modules.rl import GRPOLightningModule
    from rollout.types import SamplingSpec

log = logging.getLogger("preflight")


def check(config: DictConfig) -> None:
    """Raise ConfigError when the run cannot work on this machine or its numbers do not fit together."""
    plain = to_plain(config)
    refuse([*arithmetic_problems(plain), *method_problems(plain), *machine_problems(plain), *path_problems(plain)])


def world_size(plain: dict[str, Any]) -> int:
    """Ranks of the whole run."""
    return int(plain["trainer"]["devices"]) * int(plain["trainer"]["num_nodes"])


def arithmetic_problems(plain: dict[str, Any]) -> list[str]:
    """Numbers that contradict each other, each with its fix."""
    problems = []
    world = world_size(plain)
    data, module = plain["data"], plain["module"]
    rollout_batch = int(data["rollout_batch_size"])
    if rollout_batch % world:
        problems.append(
            f"data.rollout_batch_size={rollout_batch} does not divide among {world} ranks; "
            f"use {max(world, round(rollout_batch / world) * world)}"
        )
    update_batch = module.get("update_batch_size")
    if update_batch and rollout_batch % int(update_batch):
        problems.append(
            f"data.rollout_batch_size={rollout_batch} is not a multiple of module.update_batch_size={update_batch}; "
            f"use a divisor of {rollout_batch}"
        )
    if update_batch and int(update_batch) % world:
        problems.append(f"module.update_batch_size={update_batch} does not divide among {world} ranks")
    tensor_parallel = int(_get(plain, "rollout.engine.tensor_parallel_size", 1))
    if world % tensor_parallel:
        problems.append(
            f"rollout.engine.tensor_parallel_size={tensor_parallel} does not divide the {world} ranks of the run"
        )
    if strategy_class(plain).one_device and world > 1:
        problems.append(f"strategy=single uses one device, but the run has {world} ranks; use strategy=fsdp or ddp")
    return problems


def method_problems(plain: dict[str, Any]) -> list[str]:
    """What algorithm, settings, family, layout and rollouts ask of each other; builds the module, loads nothing."""
    problems = layout_problems(plain)
    try:
        module = build(plain["module"])
    except ConfigError as error:
        where = "" if str(error).startswith("algorithm") else "module."
        return problems or [f"{where}{error}"]
    if not _generates(plain):
        return [*problems, *_answer_problems(module)]
    try:
        sampling = build(plain["rollout"]["sampling"])
    except ConfigError as error:
        return [*problems, f"rollout.sampling: {error}"]
    algorithm, n, least = module.algorithm, sampling.n, module.algorithm.min_responses
    if n < least:
        problems.append(
            f"rollout.sampling.n={n}: {type(algorithm).__name__} compares the responses of one prompt and needs at "
            f"least {least}; use n={least} or more, or an algorithm that takes single responses (reinforce_pp, remax)"
        )
    if not algorithm.reads_rewards:
        problems.append(
            f"algorithm: {type(algorithm).__name__} learns from given answers, not from rewards of the policy's own: "
            "use module=sft, or another algorithm"
        )
    if module.update_settings.temperature != sampling.temperature:
        problems.append(
            f"module.temperature={module.update_settings.temperature} but rollout.sampling.temperature="
            f"{sampling.temperature}; leave module.temperature out"
        )
    problems += _filling_problems(algorithm, plain)
    problems += _offline_problems(plain, sampling)
    limit, prompt = _get(plain, "rollout.engine.max_model_len"), _get(plain, "data.max_prompt_tokens")
    response = sampling.max_tokens
    if limit and prompt and int(prompt) + response > int(limit):
        problems.append(
            f"data.max_prompt_tokens={prompt} and rollout.sampling.max_tokens={response} exceed "
            f"rollout.engine.max_model_len={limit}; use {int(prompt) + response}"
        )
    return problems


def _offline_problems(plain: dict[str, Any], sampling: SamplingSpec) -> list[str]:
    """What the paradigm of `offline=` says about its own settings and about the sampling."""
    chosen = plain.get("offline") or {}
    if "_target_" not in chosen:
        return []
    try:
        callback = build(chosen)
        if callback.enable:
            callback.check(sampling)
    except ValueError as error:  # ConfigError included
        return [f"offline: {error}"]
    return []


def _answer_problems(module: GRPOLightningModule) -> list[str]:
    """An algorithm that compares rewards where every target is right."""

    if not isinstance(module, SFTLightningModule) or not module.algorithm.reads_rewards:
        return []
    return [
        f"algorithm: {type(module.algorithm).__name__} learns from rewards, which given answers do not differ in: "
        "use algorithm=supervised"
    ]


def _filling_problems(algorithm: Algorithm, plain: dict[str, Any]) -> list[str]:
    """A number of groups that dynamic sampling could not reach if every one carried signal."""
    settings, batch = algorithm.dynamic_sampling, int(_get(plain, "data.rollout_batch_size", 1))
    if settings is None or settings.target_groups is None or settings.target_groups <= settings.max_rounds * batch:
        return []
    return [
        f"algorithm.dynamic_sampling.target_groups={settings.target_groups} is more than max_rounds="
        f"{settings.max_rounds} batches of data.rollout_batch_size={batch} hold; use at most "
        f"{settings.max_rounds * batch}"
    ]


def layout_problems(plain: dict[str, Any]) -> list[str]:
    """A layout or family that does not exist, or a layout that is not exact for the family; loads nothing."""

    found: dict[str, Any] = {}
    for key in ("model.family", "module.layout"):
        target = _get(plain, f"{key}._target_")
        if target is None:
            return []
        try:
            found[key] = get_class(target)
        except ImportError:
            return [f"{key}._target_={target} cannot be imported"]
    family, layout = found["model.family"], found["module.layout"]
    try:
        family.check_layout(layout.name)
    except ValueError as error:
        return [str(error)]
    return []


def _generates(plain: dict[str, Any]) -> bool:
    """Whether the run draws responses from an engine."""
    callbacks = [callback for callback in (plain.get("callbacks") or {}).values() if callback]
    return any(issubclass(get_class(callback["_target_"]), ColocatedEngineCallback) for callback in callbacks)


def strategy_class(plain: dict[str, Any]) -> type[PolicyStrategy]:
    """Class of the strategy; where `_target_` is a function, what it says that it returns."""
    made = get_object(plain["strategy"]["_target_"])
    return made if isinstance(made, type) else get_type_hints(made)["return"]


def _get(plain: dict[str, Any], dotted: str, default: Any = None) -> Any:
    node: Any = plain
    for key in dotted.split("."):
        if not isinstance(node, dict) or node.get(key) is None:
            return default
        node = node[key]
    return node


def gpu_count() -> int:
    """GPUs of this machine, without importing torch."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_problems(plain: dict[str, Any]) -> list[str]:
    """What this machine or environment lacks."""
    problems = []
    devices = int(plain["trainer"]["devices"])
    if plain["trainer"]["accelerator"] in ("gpu", "cuda"):
        available = gpu_count()
        if devices > available:
            problems.append(
                f"trainer.devices={devices}, but this machine has {available} GPUs; use trainer=cpu or fewer"
            )
    elif devices > cpu_count():
        problems.append(
            f"trainer.devices={devices}, but this machine has {cpu_count()} cores; use {cpu_count()} or fewer"
        )
    needs_vllm = _generates(plain) and getattr(get_class(plain["rollout"]["engine"]["_target_"]), "needs_vllm", False)
    if needs_vllm and importlib.util.find_spec("vllm") is None:
        problems.append("vLLM is not installed: pip install -e '.[gpu]' (or '.[cpu]'), or use rollout=hf")
    return problems


def path_problems(plain: dict[str, Any]) -> list[str]:
    """Model and data paths that do not exist. What a pipeline's own stages build is not expected to be there yet."""
    problems = []
    built_here = Path(plain["assets_dir"]).resolve() if plain.get("stages") else None
    for key in ("train_files", "val_files"):
        for path in file_list(plain["data"].get(key)):
            if not Path(path).exists() and not _below(path, built_here):
                problems.append(f"data.{key}: {path} does not exist")
    root = plain["data"].get("media_root")
    if root and not Path(root).is_dir() and not _below(root, built_here):
        problems.append(f"data.media_root={root} is not a folder")
    problem = model_problem(str(plain["model"]["path"]))
    if problem and not _below(plain["model"]["path"], built_here):
        problems.append(problem)
    return problems


def file_list(value: Any) -> list[str]:
    """Paths in a `train_files` value: one path, a list of paths, or a mapping from path to mixture weight."""
    if value in (None, "", "???"):
        return []
    if isinstance(value, str):
        return [value]
    return [str(v["path"] if isinstance(v, dict) else v) for v in value]


def _below(path: str | Path, folder: Path | None) -> bool:
    return folder is not None and Path(path).resolve().is_relative_to(folder)


def model_problem(path: str) -> str | None:
    """Why the model at `path` (folder or hub name) cannot be loaded here, or None."""
    if Path(path).is_dir():
        return None if (Path(path) / "config.json").is_file() else f"model.path={path} holds no config.json"
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return f"model.path={path} does not exist"

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return None
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return f"model.path={path} is not in the Hugging Face cache and HF_HUB_OFFLINE is set"
    return None


def print_plan(config: DictConfig) -> int:
    """Log the plan of the run; 0 when everything it needs is here, 1 when something is missing, 2 when it is wrong."""

    unset = sorted(OmegaConf.missing_keys(config))
    for key in unset:
        OmegaConf.update(config, key, "")
    plain = to_plain(config)
    for line in plan_lines(plain):
        log.info("%s", line)
    log.info("  folder: %s", plan_run(config).note)
    wrong = [*arithmetic_problems(plain), *method_problems(plain)]
    missing = [f"{key} is not set" for key in unset] + machine_problems(plain) + path_problems(plain)
    model = str(plain["model"]["path"])
    cached = isinstance(try_to_load_from_cache(model, "config.json"), str) if model.count("/") == 1 else False
    if not Path(model).is_dir() and model_problem(model) is None and not cached:
        missing.append(f"model {model} is not in the Hugging Face cache; it will be downloaded at the start")
    for title, items in (("does not fit together", wrong), ("missing on this machine", missing)):
        for item in items:
            log.info("  %s: %s", title, item)
    log.info("plan only, nothing was loaded: %s", "ready" if not wrong and not missing else "not ready")
    return 2 if wrong else 1 if missing else 0


def plan_lines(plain: dict[str, Any]) -> list[str]:
    """The plan in words: ranks, prompts and rollouts, micro-batches, tokens, memory, engine."""
    world = world_size(plain)
    trainer, data, module = plain["trainer"], plain["data"], plain["module"]
    sampling = _get(plain, "rollout.sampling", {})
    engine = _get(plain, "rollout.engine", {})
    tensor_parallel = int(engine.get("tensor_parallel_size", 1))
    prompts = int(data["rollout_batch_size"])
    n = int(sampling.get("n", 1))
    update = int(module.get("update_batch_size") or prompts)
    lines = [
        f"plan of {plain['name']}: model {plain['model']['path']}, {plain['max_steps']} steps, seed {plain['seed']}",
        f"  ranks: {world} = {trainer['num_nodes']} nodes x {trainer['devices']} ({trainer['accelerator']}), "
        f"strategy {strategy_class(plain).title}",
        f"  prompts: {prompts} per step, {prompts // world} per rank; rollouts: n={n}, {prompts * n} per step, "
        f"{prompts // world * n} per rank",
        f"  updates: {prompts // update} per step of {update} prompts"
        + (" (on-policy: one update per step, the clip range is inert)" if prompts == update else ""),
        f"  engine: {world // tensor_parallel} groups of tensor-parallel size {tensor_parallel}; "
        + ", ".join(f"{k}={v}" for k, v in sorted(engine.items()) if not isinstance(v, dict) and not k.startswith("_")),
    ]
    layout: type[Layout] = get_class(module["layout"]["_target_"])
    return lines + memory_plan(plain, world, strategy_class(plain).shards_policy, layout.keeps_groups)
