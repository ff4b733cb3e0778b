"""A stopped or killed run, continued by the same command, equals one that was never stopped."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from train_helpers import SIGINT, SIGKILL, SIGTERM, assert_same_run, rows, run, start, stop, wait_for_step
from waiting import file_exists

from datamodules.common.files import FolderLock

STEPS = 6


def arguments(assets, run_dir, *more):
    return (
        "experiment=tiny_cpu",
        f"assets_dir={assets}",
        f"run_dir={run_dir}",
        f"max_steps={STEPS}",
        "data.rollout_batch_size=8",
        "rollout.sampling.n=4",
        "data.max_val_samples=12",
        "callbacks.evaluation.every_n_steps=0",
        "callbacks.checkpoint.every_n_steps=2",
        *more,
    )


@pytest.fixture(scope="module")
def straight(tiny_assets, tmp_path_factory):
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run(*arguments(tiny_assets, run_dir))
    return run_dir


@pytest.mark.parametrize(("signum", "code"), [(SIGINT, 130), (SIGTERM, 130)])
def test_asked_to_stop_then_continued(tiny_assets, straight, tmp_path, signum, code):
    command = arguments(tiny_assets, tmp_path / "run")
    process = start(tmp_path / "log", *command)
    wait_for_step(process, tmp_path / "run", 2, tmp_path / "log")
    assert stop(process, signum) == code
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "stopped"
    assert 2 <= status["step"] < STEPS
    assert max(rows(tmp_path / "run")) == status["step"]
    run(*command)
    assert_same_run(straight, tmp_path / "run")


def test_a_stop_during_start_up_leaves_at_once_without_a_checkpoint(tiny_assets, tmp_path):
    process = start(tmp_path / "log", *arguments(tiny_assets, tmp_path / "run"))
    file_exists(tmp_path / "run" / "logs" / "rank_0.log")
    assert stop(process, SIGINT) == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] != "failed"


def test_a_second_process_is_kept_out_of_the_run_folder(tiny_assets, tmp_path):
    with FolderLock(tmp_path / "run"):
        output = run(*arguments(tiny_assets, tmp_path / "run"), check=2)
    assert f"is being written by process {os.getpid()}" in output
    assert "run_name" in output
    assert not (tmp_path / "run" / "status.json").exists()


def test_killed_then_continued_loses_only_the_steps_since_the_last_checkpoint(tiny_assets, straight, tmp_path):
    command = arguments(tiny_assets, tmp_path / "run")
    process = start(tmp_path / "log", *command)
    wait_for_step(process, tmp_path / "run", 3, tmp_path / "log")
    stop(process, SIGKILL)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "trainer.json").is_file()
    output = run(*command)
    assert "after step 2" in output or "after step 4" in output
    assert_same_run(straight, tmp_path / "run")


SHARDED = ("strategy=fsdp", "trainer.devices=2")


@pytest.fixture(scope="module")
def sharded(tiny_assets, tmp_path_factory):
    """A run of two sharded ranks that was never stopped."""
    run_dir = tmp_path_factory.mktemp("sharded") / "run"
    run(*arguments(tiny_assets, run_dir, *SHARDED))
    return run_dir


@pytest.fixture(scope="module")
def continued(tiny_assets, tmp_path_factory):
    """A run of two sharded ranks that was asked to stop, and continued to its end."""
    folder = tmp_path_factory.mktemp("continued")
    command = arguments(tiny_assets, folder / "run", *SHARDED)
    process = start(folder / "log", *command)
    wait_for_step(process, folder / "run", 2, folder / "log")
    assert stop(process, SIGINT) == 130
    run(*command)
    return folder / "run"


def test_two_sharded_ranks_stop_and_continue(sharded, continued):
    assert_same_run(sharded, continued)


def test_the_first_step_does_not_depend_on_the_number_of_ranks(straight, sharded):
    first, alone = rows(sharded)[1], rows(straight)[1]
    for name in ("reward/total", "rollout/response_tokens_count"):
        assert float(first[name]) == pytest.approx(float(alone[name]), abs=1e-6)
    assert float(first["losses/policy"]) == pytest.approx(float(alone["losses/policy"]), abs=1e-5)
    assert float(first["train/grad_norm"]) == pytest.approx(float(alone["train/grad_norm"]), rel=1e-4)


def test_a_sharded_checkpoint_continues_in_one_process_and_that_ones_in_two(tiny_assets, sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "run")
    output = run(*arguments(tiny_assets, tmp_path / "run", f"max_steps={STEPS + 1}"))
    assert f"after step {STEPS}" in output
    assert max(rows(tmp_path / "run")) == STEPS + 1
    output = run(*arguments(tiny_assets, tmp_path / "run", *SHARDED, f"max_steps={STEPS + 2}"))
    assert f"after step {STEPS + 1}" in output
    assert max(rows(tmp_path / "run")) == STEPS + 2
