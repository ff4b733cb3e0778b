"""Imports run one way, and importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys

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


def test_importing_every_types_module_loads_no_heavy_library():
    code = (
        "import sys, datamodules.types, rollout.types, rewards.base, lightning_modules.types\n"
        "heavy = {'torch', 'vllm', 'transformers', 'lightning', 'ray', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
