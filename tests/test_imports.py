"""Imports run one way, and importing costs nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec

import pytest
from conftest import ROOT

ALLOWED = {
    "datamodules": set(),
    "rollout": {"datamodules"},
    "rewards": {"datamodules", "rollout"},
    "eval": {"datamodules", "rollout", "rewards"},
    "lightning_modules": {"datamodules", "rollout", "rewards", "eval"},
}


LAYERS = {
    "datamodules": (
        ("common",),
        ("errors", "types", "records"),
        ("video",),
        (".",),
        ("demo",),
    ),
    "rollout": (("types", "model_folder"), ("engines",), (".",)),
    "rewards": (
        ("extract", "geometry", "sandbox", "judge.client"),
        ("base",),
        ("tasks",),
        ("judge",),
        ("official",),
        (".",),
    ),
    "eval": (("engine", "benchmarks"), ("run",), ("report",), (".",)),
    "lightning_modules": (
        ("core", "algorithms"),
        ("families",),
        ("layouts", "strategies", "state"),
        ("update",),
        ("offline", "callbacks", "modules"),
        ("launch",),
    ),
}
"""Per package what lies below what: folders and modules, the lowest layer first; "." is every other module."""


def layer(module: str) -> int:
    """Number of a module's layer in its package; the longest name that fits decides."""
    package, _, name = module.partition(".")
    numbers = {entry: number for number, entries in enumerate(LAYERS[package]) for entry in entries}
    while name and name not in numbers:
        name = name.rpartition(".")[0]
    return numbers[name or "."]


def module_imports() -> dict[str, set[str]]:
    """Module -> the modules of ours that it names anywhere, also inside functions and for type checkers only."""
    files = {
        path: path.relative_to(ROOT).with_suffix("") for package in LAYERS for path in (ROOT / package).rglob("*.py")
    }
    names = {path: ".".join(part for part in place.parts if part != "__init__") for path, place in files.items()}
    known = set(names.values())
    found: dict[str, set[str]] = {}
    for path, name in names.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                longer = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= longer & known or {node.module}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[name] = (targets & known) - {name}
    return found


def imported_packages(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_one_way(package):
    forbidden = set(ALLOWED) - ALLOWED[package] - {package}
    wrong = {
        str(path.relative_to(ROOT)): sorted(imported_packages(path) & forbidden)
        for path in (ROOT / package).rglob("*.py")
        if imported_packages(path) & forbidden
    }
    assert wrong == {}


def test_no_import_inside_a_package_points_upwards():
    upwards = [
        f"{name} -> {target}"
        for name, targets in sorted(module_imports().items())
        for target in sorted(targets)
        if name.split(".")[0] == target.split(".")[0] and "." in name and "." in target and layer(target) > layer(name)
    ]
    assert upwards == []


def test_no_module_imports_itself_through_others():
    graph = module_imports()
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_entry_points_and_launch_itself_import_launch():
    wrong = [
        name
        for name, targets in module_imports().items()
        if any(target.startswith("lightning_modules.launch") for target in targets)
        and not name.startswith("lightning_modules.launch")
    ]
    assert wrong == []


def test_every_imported_name_exists():
    """Also those that are imported inside functions, where only a certain command line would find out."""
    folders = [*ALLOWED, "scripts", "tests"]
    files = [ROOT / "train.py", ROOT / "evaluate.py", *(p for f in folders for p in (ROOT / f).rglob("*.py"))]
    missing = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            own = isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in ALLOWED
            if not own:
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}")
                if not hasattr(module, alias.name) and not is_module:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}")
    assert missing == []


def test_importing_every_types_module_loads_no_heavy_library():
    code = (
        "import sys, datamodules.types, rollout.types, rewards.base, lightning_modules.core.types\n"
        "heavy = {'torch', 'vllm', 'transformers', 'lightning', 'ray', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_nothing_is_defined_below_the_start_of_a_program():
    """What stands there exists for whoever imports the file, and not when it is started."""
    wrong = []
    for path in (p for folder in [*ALLOWED, "scripts"] for p in (ROOT / folder).rglob("*.py")):
        body = ast.parse(path.read_text()).body
        starts = [i for i, node in enumerate(body) if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
        if starts and starts[0] != len(body) - 1:
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []
