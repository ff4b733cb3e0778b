"""An installed package works from any folder: option files, templates and the three commands are in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT

DATA = (".yaml", ".jinja", ".html")


def call(*command: str, cwd: Path, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("EVR1_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a wheel is built from: building leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("datamodules", "rollout", "rewards", "eval", "lightning_modules", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def site(sources, tmp_path_factory):
    """The wheel, unpacked into a folder of its own; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    call(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources), cwd=folder)
    wheel = next(folder.glob("*.whl"))
    call(*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


def data_files(*folders: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in DATA and "__pycache__" not in path.parts
    }


def test_every_option_file_and_template_is_in_the_wheel(site):
    for package in ("datamodules", "rollout", "rewards", "eval"):
        assert data_files(site / package) == data_files(ROOT / package)
    assert data_files(site / "lightning_modules" / "conf") == data_files(ROOT / "conf")
    assert not (site / "conf").exists()


PLANS = """
import sys
from datamodules.common.places import ROOT, option_files
from lightning_modules.launch.cli import main
assert str(ROOT) == sys.argv[1], ROOT
for name in option_files("experiment"):
    print(name, main([f"experiment={name}", "preflight=only"]))
"""


def test_the_plan_of_every_experiment_is_printed_from_another_folder(site, tmp_path):
    output = call(sys.executable, "-c", PLANS, str(site), cwd=tmp_path, PYTHONPATH=str(site))
    names = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("[!_]*.yaml"))
    for name in names:
        assert f"plan of {name}: " in output
        assert f"{name} 0" in output or f"{name} 1" in output  # 1: this machine lacks something
    assert "does not fit together" not in output


def test_the_commands_are_installed(site, tmp_path):
    listed = call(sys.executable, str(site / "bin" / "evr1-evaluate"), "list", cwd=tmp_path, PYTHONPATH=str(site))
    assert sum(path.stem in listed for path in (ROOT / "conf" / "benchmark").glob("[!_]*.yaml")) >= 25
    helped = call(sys.executable, str(site / "bin" / "evr1-train"), "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "experiment=tiny_cpu" in helped
    assert (site / "bin" / "evr1-preprocess").is_file()


def test_the_assets_of_a_demo_are_built_by_the_wheel(site, tmp_path):
    """Model and data, by the module that the first stage of the experiment names."""
    code = "import sys; from lightning_modules.launch.assets import main; sys.exit(main(sys.argv[1:]))"
    call(sys.executable, "-c", code, "experiment=tiny_mix_policy", cwd=tmp_path, PYTHONPATH=str(site))
    assert (tmp_path / ".cache" / "tiny" / "mix0" / "data" / "cold_train.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_an_empty_environment_needs_nothing_but_the_package(sources, tmp_path):
    """`pip install .` downloads several gigabytes; the plan builds every component but the engine."""
    if os.environ.get("PIP_NO_INDEX"):
        pytest.skip("there is no package index")
    venv.create(tmp_path / "venv", with_pip=True)
    binary = tmp_path / "venv" / "bin"
    call(str(binary / "python"), "-m", "pip", "install", "--quiet", str(sources), cwd=tmp_path)
    for path in sorted((ROOT / "conf" / "experiment").glob("[!_]*.yaml")):
        command = [str(binary / "evr1-train"), f"experiment={path.stem}", "preflight=only"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert f"plan of {path.stem}: " in done.stdout
