"""Check every key of a composed configuration against the types of what reads it, before anything is built.

A node with `_target_` is read by that constructor: its keywords, those of the classes it hands `**keywords` on to, and
the annotations of all of them. Keys outside such nodes are listed here with their types.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import importlib
import inspect
import json
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PositiveInt, TypeAdapter, ValidationError


class Component:
    """Stands for every class that is no plain value: such a key needs a node with `_target_`."""

    def __class_getitem__(cls, item: Any) -> type[Component]:
        return cls


Name = str | int | float
Number = int | float | None

TRAIN: dict[str, Any] = {
    **dict.fromkeys(("name", "output_dir", "assets_dir", "resume", "model.path"), Name),
    **dict.fromkeys(("run_name", "run_dir"), Name | None),
    **dict.fromkeys(("data", "algorithm", "module", "rollout.engine", "rollout.sampling", "reward"), Any),
    **dict.fromkeys(("strategy", "model.family"), Any),
    **dict.fromkeys(("config_dir",), str | list[str] | None),
    **dict.fromkeys(("max_steps", "trainer.devices", "trainer.num_nodes", "data.rollout_batch_size"), PositiveInt),
    **dict.fromkeys(("trainer.threads_per_rank", "module.update_batch_size"), PositiveInt | None),
    **dict.fromkeys(("rollout.engine.tensor_parallel_size",), PositiveInt),
    **dict.fromkeys(("logger.tensorboard", "logger.csv"), bool),
    **{f"model.size.{key}": int for key in ("layers", "hidden", "intermediate", "vocabulary", "kv_heads", "head_dim")},
    **{f"model.size.{key}": float for key in ("parameters", "pixel_factor", "temporal_patch", "device_memory_gib")},
    "offline": Component | Mapping[str, Any],
    "assets": Component | None,
    "callbacks.*": Component | None,
    "stages": list[Mapping[str, Any]] | None,
    "seed": int,
    "preflight": Literal["on", "only", "off"],
    "trainer.accelerator": Literal["cpu", "gpu", "cuda"],
}
"""Keys of conf/train.yaml that no constructor reads by that name, or that must count something."""

EVALUATE: dict[str, Any] = {
    **dict.fromkeys(("reward", "driver", "sampling"), Any),
    **dict.fromkeys(("model_path", "data_root", "model_name", "split", "source", "baseline"), Name | None),
    **dict.fromkeys(("output_dir", "stage", "style", "frame_policy"), str),
    "prepare.cache_codec": Literal["raw", "lossless", "jpeg"],
    "prepare.decoder": Literal["pyav", "torchcodec", "decord"],
    "prepare.cache_dir": str | None,
    "family": Component | None,
    **dict.fromkeys(("benchmarks", "config_dir"), str | list[str] | None),
    **{f"frames.{key}": Number for key in ("fps", "min_frames", "max_frames")},
    **{f"{part}.{key}": Number for part in ("frames", "images") for key in ("min_pixels", "max_pixels")},
    "frames.total_pixels": Number,
    **dict.fromkeys(("limit", "prepare.max_prompt_tokens"), int | None),
    **dict.fromkeys(("seed", "report_items", "tensorboard_step"), int),
    **dict.fromkeys(("available_only", "retry_failed", "tensorboard"), bool),
    **dict.fromkeys(("score_timeout_s", "prepare.deadline_s", "prepare.max_gib"), float),
    "prepare.processes": PositiveInt,
}
"""The same for conf/evaluate.yaml."""


@dataclass(frozen=True)
class Problem:
    """One key that cannot be as it is."""

    text: str
    """What is wrong, without the names that would be right."""
    name: str = ""
    """What was written."""
    valid: tuple[str, ...] = ()
    """What may stand there; the nearest ones help the user."""


class _Names(dict[str, Any]):
    """What the annotations of `function` may name; a class that only type checkers import is a component."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(vars(typing) | vars(collections.abc) | vars(builtins) | {"Path": Path})
        self.update(getattr(function, "__globals__", {}))

    def __missing__(self, name: str) -> Any:
        return Component


_PLAIN = (bool, int, float, str, tuple, list, dict)


@functools.cache
def keywords(target: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Every keyword that `target` takes with its annotation, and whether it takes any others.

    `**keywords` of a constructor go to the dataclass that the class names in `forwards_to`, else to the next class.
    """
    found: dict[str, Any] = {}
    for link in inspect.getmro(target) if isinstance(target, type) else (target,):
        function = vars(link).get("__init__") if isinstance(link, type) else link
        if function is None or link is object:
            continue
        hints = typing.get_type_hints(function, {}, _Names(function), include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[int(isinstance(link, type)) :]
        more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                known = hints.get(parameter.name, Any)
                if isinstance(parameter.default, _PLAIN) and any(_misfit("", parameter.default, known)):
                    known = Any  # of a name that only type checkers import
                found.setdefault(parameter.name, known)
        if more and "forwards_to" in vars(link):
            rest, more = keywords(vars(link)["forwards_to"])
            return {**rest, **found}, more
        if not more:
            return found, False
    return found, not isinstance(target, type)


def problems(config_name: str, config: DictConfig) -> list[Problem]:
    """What is wrong with the keys and values of `config`; loads the classes that it names and builds none."""
    table = {"train": TRAIN, "evaluate": EVALUATE}.get(config_name, {})
    return list(_walk(config, "", table, OmegaConf.to_yaml(config)))


def _walk(node: DictConfig, prefix: str, table: Mapping[str, Any], text: str) -> Iterator[Problem]:
    """Problems of the keys below `node`, whose own key with a dot behind it is `prefix`."""
    names = {key.removeprefix(prefix).partition(".")[0] for key in table if key.startswith(prefix)}
    takes = {name: table.get(f"{prefix}{name}", Mapping[str, Any] | None) for name in names}
    more = not takes or "*" in takes
    if isinstance(target := node.get("_target_"), str):
        takes, more = keywords(loaded) if (loaded := _load(target)) is not None else ({}, True)
    for name in map(str, node):
        key = f"{prefix}{name}"
        child: Any = node._get_node(name)
        if name.startswith("_") or child._is_missing():
            continue
        if name not in takes and not more and not re.search(rf"\$\{{{re.escape(key)}[.}}]", text):
            yield Problem(f"unknown config key '{key}'", key, tuple(f"{prefix}{other}" for other in takes))
            continue
        plain = not _is_container(child)
        nodes = [] if plain else list(_nodes(child, key, table))
        for place, below in nodes:
            yield from _walk(below, f"{place}.", table, text)
        wanted = table.get(key, takes.get(name, takes.get("*", Any)))
        if nodes or wanted is Any:
            continue
        try:
            value = node[name] if plain else OmegaConf.to_container(child, resolve=True)
        except OmegaConfBaseException:
            continue  # said when everything is resolved
        # Another node is looked at in its own place; what is null elsewhere (the run folder) is not decided yet.
        if not OmegaConf.is_config(value) and not (value is None and child._is_interpolation()):
            yield from _misfit(key, value, wanted)


def _is_container(node: Any) -> bool:
    return OmegaConf.is_config(node) and not node._is_none() and not node._is_interpolation()


def _nodes(child: Any, key: str, table: Mapping[str, Any]) -> Iterator[tuple[str, DictConfig]]:
    """The mappings in `child` whose keys are looked at one by one: sections of `table`, and nodes with `_target_`."""
    if OmegaConf.is_dict(child) and ("_target_" in child or any(k.startswith(f"{key}.") for k in table)):
        yield key, child
        return
    for name in list(child) if OmegaConf.is_dict(child) else range(len(child)):
        if _is_container(below := child._get_node(name)):
            yield from _nodes(below, f"{key}.{name}", table)


def _load(target: str) -> Callable[..., Any] | None:
    """The constructor that `_target_` names; None when it cannot be imported, which building it reports in full."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _misfit(key: str, value: Any, wanted: Any) -> Iterator[Problem]:
    adapter, words, choices = _checker(wanted)
    parts = get_args(wanted) if get_origin(wanted) in _UNIONS else (wanted,)
    if isinstance(value, dict) and (maps := [part for part in parts if get_origin(part) is collections.abc.Mapping]):
        for name, entry in value.items():
            yield from _misfit(f"{key}.{name}", entry, get_args(maps[0])[1])
        return
    try:
        # JSON's rules: a list may be a tuple and a whole number a number; nothing else stands for anything else.
        adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError:
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        problem = f"{key}={shown} is unknown" if choices else f"{key}={shown}: {words} is expected"
        yield Problem(problem, str(shown), choices)


_REFUSED = Literal["<component>"]
_UNIONS = (Union, types.UnionType)


@functools.cache
def _checker(wanted: Any) -> tuple[TypeAdapter[Any], str, tuple[str, ...]]:
    """What validates a plain value for the annotation, what it wants in words, and the words that a Literal allows."""
    plain = _plain(wanted)
    parts = get_args(plain) if get_origin(plain) in _UNIONS else (plain,)
    literals = [part for part in parts if get_origin(part) is Literal and part != _REFUSED]
    choices = tuple(str(choice) for part in literals for choice in get_args(part))
    words = list(dict.fromkeys(_words(part) for part in parts))
    return TypeAdapter(plain), " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words), choices


def _plain(wanted: Any) -> Any:
    """`wanted` with a refusal in the place of everything that no plain value can be."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    base = origin or wanted
    if base is Literal or wanted in (bool, int, float, str, Path, Any, None, type(None)):
        return wanted
    if base in _UNIONS:
        return functools.reduce(operator.or_, map(_plain, arguments))
    if base is Annotated:
        return typing.cast(Any, Annotated)[(_plain(arguments[0]), *arguments[1:])]
    if base is tuple and arguments:
        return types.GenericAlias(tuple, tuple(part if part is ... else _plain(part) for part in arguments))
    if isinstance(base, type) and base is not object and issubclass(base, collections.abc.Mapping):
        return types.GenericAlias(dict, tuple(map(_plain, arguments or (Any, Any))))
    if isinstance(base, type) and base is not object and issubclass(base, collections.abc.Iterable):
        return types.GenericAlias(list, tuple(map(_plain, arguments or (Any,))))
    return Any if base is object or isinstance(base, typing.TypeVar) else _REFUSED


def _words(part: Any) -> str:
    origin = get_origin(part)
    if origin in (Literal, dict, list, tuple):
        return "a node with _target_" if origin is Literal else "a mapping" if origin is dict else "a list"
    if origin is Annotated:
        return "a whole number of at least 1"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return names.get(part, "null")
