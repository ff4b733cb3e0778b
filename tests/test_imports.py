"""Imports run one way, and importing costs nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
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
