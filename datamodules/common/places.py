"""Where the program and its option files lie, and the user's own folders of options and Python beside them.

The same from a checkout, where `conf/` is a folder of the repository, and from an installed wheel, where it is inside
the package. A user's folder has the shape of `conf/` (`algorithm/mine.yaml`, `benchmark/mine.yaml`, ...); its Python
files can be imported. Child processes of every kind inherit the folders through the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the packages: the checkout, or site-packages."""
_PACKAGED = ROOT / "lightning_modules" / "conf"
CONF_DIR = _PACKAGED if _PACKAGED.is_dir() else ROOT / "conf"
"""The project's own option files."""
CONFIG_DIR_ENV = "EVR1_CONFIG_DIR"
"""The user's folders of options, separated as in PATH."""


def config_dirs() -> list[Path]:
    """The user's folders of options, as named by `add_config_dirs` or the environment."""
    return [Path(folder) for folder in os.environ.get(CONFIG_DIR_ENV, "").split(os.pathsep) if folder]


def add_config_dirs(folders: Iterable[str | Path]) -> None:
    """Add user's folders of options, for this process and the ones it starts: options are found, Python is importable.

    Raises:
        ValueError: one of them is not a folder.
    """
    known = config_dirs()
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise ValueError(f"config_dir={folder} is not a folder")
        if path not in known:
            known.append(path)
    os.environ[CONFIG_DIR_ENV] = os.pathsep.join(map(str, known))
    paths = [str(ROOT), *map(str, known)]
    # Before what is installed, so that children started in any folder import these files and no others.
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in paths]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *rest])
    sys.path += [path for path in paths if path not in sys.path]


def group_names() -> set[str]:
    """Groups of options over all folders, nested ones such as `module/layout` too: folders that hold YAML files."""
    tops = (CONF_DIR, *config_dirs())
    return {path.parent.relative_to(top).as_posix() for top in tops for path in top.rglob("*.yaml")} - {"."}


def option_files(group: str) -> dict[str, Path]:
    """YAML files of one group by name, the project's before the user's; those that start with "_" are no options."""
    found: dict[str, Path] = {}
    for folder in (CONF_DIR, *config_dirs()):
        for path in sorted((folder / group).glob("*.yaml")):
            if not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return found
