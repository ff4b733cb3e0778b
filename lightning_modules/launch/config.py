"""Compose the configuration of an entry point, and say what is wrong with a typo in one line.

Only this folder and the entry points see a `DictConfig`; components receive plain, typed keyword arguments.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datamodules.common.places import CONF_DIR, add_config_dirs, config_dirs, group_names, option_files

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from datamodules.video_rl import VideoRLDataModule

RETIRED_KEYS = {
    "data.problem_types": "data.problem_types is no longer a setting: the known problem types are the routes and "
    "aliases of reward=..., add yours there (docs/adding-a-reward.md)",
    "module.update_options": "module.update_options is gone: its keys are keys of module now, for example "
    "module.entropy_bonus",
}
"""Keys of earlier versions, with what to do instead."""


class ConfigError(ValueError):
    """The user's command line or configuration is wrong; the message is one line that says what to do."""


def nearest(name: str, valid: Iterable[str], count: int = 3) -> str:
    """Return "; did you mean a, b?" for the closest of `valid`, or the whole list when none is close."""
    names = sorted(set(valid))
    parent, _, last = name.rpartition(".")
    # The right key at the wrong place comes first, those below the same parent before others.
    misplaced = sorted((n for n in names if n.rpartition(".")[2] == last), key=lambda n: not n.startswith(parent))
    close = misplaced + [n for n in difflib.get_close_matches(name, names, n=count, cutoff=0.5) if n not in misplaced]
    close = close[:count]
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; valid: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"


def split_flags(arguments: Sequence[str]) -> tuple[set[str], list[str]]:
    """Flags and overrides of a command line; `--config-dir DIR` becomes the override `config_dir=DIR`."""
    flags, overrides = set(), []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            overrides.append(f"config_dir={value if equals else next(rest, '')}")
        elif argument.startswith("-"):
            flags.add(argument)
        else:
            overrides.append(argument)
    return flags, overrides


def compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `conf/<config_name>.yaml` with Hydra overrides.

    `config_dir=DIR` (or a list) and `hydra.searchpath=[file:///DIR]` add folders of the user's own options, whose
    Python files become importable here and in every process that is started from here.

    Raises:
        ConfigError: unknown group option, unknown key, or an override that does not parse, with the nearest names; a
            value of another type than what reads it takes.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not (CONF_DIR / f"{config_name}.yaml").is_file():
        raise ConfigError(f"no configuration {CONF_DIR.name}/{config_name}.yaml")
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"cannot read the command line {' '.join(overrides)!r}: {_one_line(error)}") from error
    search_path = _search_path(parsed)
    parsed = [override for override in parsed if override.key_or_group not in _SEARCH_KEYS]
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):

        def composed(overrides: Iterable[Override]) -> DictConfig:
            lines = [str(override.input_line) for override in overrides]
            return hydra_compose(config_name, overrides=[*lines, *search_path])

        try:
            _check_overrides(parsed, composed)
            config = composed(parsed)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(error)) from error
    for key, instead in RETIRED_KEYS.items():
        if OmegaConf.select(config, key) is not None:
            raise ConfigError(instead)
    from lightning_modules.launch.settings import problems  # imports every class that the configuration names

    refuse([p.text + (nearest(p.name, p.valid) if p.valid else "") for p in problems(config_name, config)])
    return config


def refuse(problems: Sequence[str]) -> None:
    """Raise one ConfigError for all of `problems`, if there are any."""
    if problems:
        raise ConfigError("; ".join(problems) if len(problems) == 1 else "\n  - " + "\n  - ".join(problems))


_SEARCH_KEYS = ("config_dir", "hydra.searchpath")


def _search_path(parsed: Sequence[Override]) -> list[str]:
    """Overrides that make Hydra look in the user's folders, which are also put where Python looks for modules."""
    for override in parsed:
        if override.key_or_group in _SEARCH_KEYS and (value := override.value()) is not None:
            use_config_dirs(value if isinstance(value, list) else [value])
    folders = ["'" + str(folder).replace("'", "\\'") + "'" for folder in config_dirs()]
    paths = [folder.replace("'", "'file://", 1) for folder in folders]
    return [
        f"hydra.searchpath=[{','.join(paths)}]",
        f"config_dir={'[' + ','.join(folders) + ']' if folders else 'null'}",
    ]


def use_config_dirs(entries: Iterable[object]) -> None:
    """Find options and Python in these folders from now on. Raises ConfigError for what is not a folder."""
    try:
        add_config_dirs(_folder(str(entry)) for entry in entries)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _folder(entry: str) -> str:
    """The folder that an entry of Hydra's search path names: file:///DIR, pkg://PACKAGE, or DIR itself."""
    if not entry.startswith("pkg://"):
        return entry.removeprefix("file://")
    try:
        found = importlib.util.find_spec(entry.removeprefix("pkg://"))
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"hydra.searchpath={entry}: there is no such package")
    return found.submodule_search_locations[0]


def _check_overrides(parsed: Sequence[Override], composed: Callable[[Iterable[Override]], DictConfig]) -> None:
    groups = group_names()
    chosen, values = [], []
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or override.is_delete() or override.is_hydra_override():
            continue
        if key in groups:
            _check_option(key, sorted(option_files(key)), override.value())
            chosen.append(override)
        else:
            values.append(override)
    base = composed(chosen)
    known = set(flat_keys(base))
    open_parents = {key for key in known if _is_open(base, key)}
    for override in values:
        key = override.key_or_group
        if key in RETIRED_KEYS:
            raise ConfigError(RETIRED_KEYS[key])
        if key not in known and not any(key.startswith(f"{parent}.") for parent in open_parents):
            raise ConfigError(f"unknown config key '{key}'{nearest(key, known | groups)}")


def _is_open(config: DictConfig, key: str) -> bool:
    """Whether `key` is an empty mapping or null, below which the user may put keys of their own."""
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, key, throw_on_missing=False)
    return OmegaConf.is_dict(node) and len(node) == 0


def _check_option(group: str, options: Sequence[str], value: Any) -> None:
    chosen = value if isinstance(value, list) else [value]
    for name in chosen:
        if str(name) in options:
            continue
        if not isinstance(name, str):
            shown = "null" if name is None else name
            raise ConfigError(f"{group}={shown}: a name is expected, one of {', '.join(options)}")
        raise ConfigError(f"{group}={name} does not exist{nearest(str(name), options)}")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])


def flat_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a config, inner nodes included; interpolations are not resolved."""
    from omegaconf import OmegaConf

    keys: list[str] = []
    for key in config:
        name = f"{prefix}{key!s}"
        keys.append(name)
        node: Any = config._get_node(key)
        if OmegaConf.is_dict(node) and not node._is_none() and not node._is_interpolation():
            keys.extend(flat_keys(node, f"{name}."))
    return keys


def require_values(config: DictConfig) -> None:
    """Raise ConfigError when a mandatory value (`???`) was not given."""
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: add {missing[0]}=... to the command line")


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Resolve every interpolation and return plain containers.

    Raises:
        ConfigError: a mandatory value (`???`) is missing or an interpolation points nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    return dict(plain)  # type: ignore[arg-type]


def build(config: DictConfig | Mapping[str, Any], **arguments: Any) -> Any:
    """Instantiate the component that `_target_` names, with plain containers.

    Raises:
        ConfigError: the component refused its arguments; the message names the key and the reason.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if not isinstance(cause, (ValueError, TypeError, ImportError, AttributeError)):
            raise
        key = str(error).rpartition("full_key: ")[2] if "full_key: " in str(error) else ""
        raise ConfigError(f"{key + ': ' if key else ''}{_one_line(cause)}") from error


def build_data(config: DictConfig, **arguments: Any) -> VideoRLDataModule:
    """The data module of a run, whose records may name every problem type that the run's reward knows.

    Args:
        config: the run's configuration; of its reward only the routes are used, no judge is needed.
        arguments: take the place of keys of `data`.

    Raises:
        ConfigError: the data module or the reward refused its arguments.
    """
    router = build(config.reward, **({"judge": None} if "judge" in config.reward else {}))
    return build(config.data, type_name=router.type_name, **arguments)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Turn `seed=1,2 algorithm=grpo,dapo` into one override list per combination (`python train.py -m ...`)."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(arguments) for batch in batches for arguments in batch]
