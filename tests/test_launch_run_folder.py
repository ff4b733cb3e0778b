"""Which folder and checkpoint a command continues."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from lightning_modules.callbacks.csv_logger import AppendingCSVLogger
from lightning_modules.launch.config import ConfigError, config_hash
from lightning_modules.launch.plan import plan_run
from lightning_modules.state.run_folder import checkpoint_path, checkpoint_steps, write_status


def config(tmp_path, **changes):
    base = {"name": "demo", "seed": 3, "output_dir": str(tmp_path), "run_name": None, "run_dir": None, "resume": "auto"}
    return OmegaConf.create({**base, "max_steps": 10, "trainer": {"devices": 1}, "algorithm": {"clip": 0.2}, **changes})


def add_checkpoint(run_dir, step):
    path = checkpoint_path(run_dir, step)
    path.mkdir(parents=True)
    (path / "trainer.json").write_text(json.dumps({"rl_step": step}))
    write_status(run_dir, "running", step=step)
    return path


def test_same_settings_name_the_same_folder_and_volatile_keys_do_not_matter(tmp_path):
    first = plan_run(config(tmp_path)).run_dir
    assert first == plan_run(config(tmp_path, max_steps=99, trainer={"devices": 2})).run_dir
    assert first != plan_run(config(tmp_path, algorithm={"clip": 0.3})).run_dir
    assert first != plan_run(config(tmp_path, seed=4)).run_dir
    assert first.name.startswith("seed3-")
    assert first.parent.name == "demo"


def test_auto_takes_the_newest_complete_checkpoint(tmp_path):
    run_dir = plan_run(config(tmp_path)).run_dir
    add_checkpoint(run_dir, 5)
    newest = add_checkpoint(run_dir, 10)
    checkpoint_path(run_dir, 15).mkdir()  # no state file: never finished
    (run_dir / "checkpoints" / "step_00000020.tmp").mkdir()
    assert list(checkpoint_steps(run_dir)) == [5, 10]
    plan = plan_run(config(tmp_path))
    assert (plan.checkpoint, plan.start_step) == (newest, 10)


def test_never_opens_a_fresh_folder_beside_the_old_one(tmp_path):
    run_dir = plan_run(config(tmp_path)).run_dir
    assert plan_run(config(tmp_path, resume="never")).run_dir == run_dir
    add_checkpoint(run_dir, 5)
    plan = plan_run(config(tmp_path, resume="never"))
    assert plan.run_dir.name == f"{run_dir.name}-2"
    assert plan.checkpoint is None


def test_a_path_continues_in_place_only_when_it_is_the_newest(tmp_path):
    run_dir = plan_run(config(tmp_path)).run_dir
    old, new = add_checkpoint(run_dir, 5), add_checkpoint(run_dir, 10)
    in_place = plan_run(config(tmp_path, resume=str(new)))
    assert (in_place.run_dir, in_place.start_step) == (run_dir, 10)
    assert plan_run(config(tmp_path, resume=str(run_dir))).checkpoint == new
    branch = plan_run(config(tmp_path, resume=str(old)))
    assert (branch.run_dir.name, branch.start_step) == (f"{run_dir.name}-2", 5)


def test_a_path_without_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        plan_run(config(tmp_path, resume=str(tmp_path / "nowhere")))


def test_config_hash_ignores_key_order():
    assert config_hash({"a": 1, "b": {"c": 2}}) == config_hash({"b": {"c": 2}, "a": 1})


def test_csv_keeps_earlier_rows_and_drops_those_after_the_resumed_step(tmp_path):
    logger = AppendingCSVLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"loss": step / 10}, step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("hal")  # what a kill in the middle of a write leaves
    resumed = AppendingCSVLogger(tmp_path, start_step=2)
    resumed.log_metrics({"loss": 0.33, "reward": 1.0}, 3)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,loss,reward",
        "1,0.1,",
        "2,0.2,",
        "3,0.33,1.0",
    ]
