"""The benchmarks by name: every YAML file in `conf/benchmark`, and in `benchmark/` of the user's folders, is one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from datamodules.common.places import option_files
from eval.benchmarks.base import Benchmark


def names(variants: bool = True) -> list[str]:
    """Names of all benchmarks; `variants=False` leaves out further settings of a benchmark (with subtitles, ...)."""
    found = sorted(option_files("benchmark"))
    return found if variants else [name for name in found if not _raw(name).get("variant_of")]


def get(name: str, **overrides: Any) -> Benchmark:
    """The benchmark of `conf/benchmark/<name>.yaml`, with other values for some of its fields.

    Raises:
        ValueError: there is none of that name (the message names the nearest), or its YAML does not fit.
    """
    try:
        return instantiate({**_raw(name), **overrides}, _convert_="all")
    except InstantiationException as error:
        raise ValueError(f"{_path(name)}: {error}") from error


def select(wanted: str | Sequence[str]) -> list[str]:
    """Names for `benchmark=`: "all", one name, or several. Raises ValueError for an unknown one and for none."""
    if wanted == "all":
        return names(variants=False)
    chosen = list(dict.fromkeys([wanted] if isinstance(wanted, str) else map(str, wanted)))
    if not chosen:
        raise ValueError("no benchmark is named: give one, a list, or all")
    for name in chosen:
        _path(name)
    return chosen


def _raw(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Content of the YAML; `base: other` takes everything that is not said here from another benchmark."""
    path = _path(name)
    if name in above:
        raise ValueError(f"{path}: base: {' -> '.join((*above, name))} is a circle")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} does not hold a mapping")
    values = dict(content)
    base = values.pop("base", None)
    return {**_raw(base, (*above, name)), **values} if base else values


def _path(name: str) -> Path:
    known = option_files("benchmark")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
        raise ValueError(f"no benchmark is called {name!r}: {hint}")
    return known[name]
