"""Which folder and checkpoint a command continues."""

from __future__ import annotations

import itertools
import json

import pytest
from omegaconf import OmegaConf

from datamodules.common.places import group_names, option_files
from lightning_modules.callbacks.csv_logger import AppendingCSVLogger
from lightning_modules.launch.cli import main, own_folders
from lightning_modules.launch.config import ConfigError, compose, expand_sweep, flat_keys
from lightning_modules.launch.identity import (
    COMPUTED,
    OPERATIONAL,
    default_run_dir,
    identity_hash,
    is_computed,
    write_identity,
)
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


def test_the_hash_ignores_the_order_of_keys():
    assert identity_hash({"a": 1, "b": {"c": 2}}) == identity_hash({"b": {"c": 2}, "a": 1})


def composed_keys() -> set[str]:
    """Every key that any option of any group brings; one option of each group at a time, each experiment alone."""
    groups = [group for group in group_names() - {"benchmark", "driver", "experiment"} if "/" not in group]
    options = [[f"{group}={name}" for name in option_files(group)] for group in groups]
    keys = set(flat_keys(compose("train", [])))
    alone = [[f"experiment={name}"] for name in option_files("experiment")]
    for choices in [*itertools.zip_longest(*options), *alone]:
        keys |= set(flat_keys(compose("train", [choice for choice in choices if choice])))
    return keys


def test_every_key_is_said_to_be_part_of_the_identity_or_not():
    """A new key belongs into one of the two lists of identity.py; a rule that fits no key is stale."""
    keys = composed_keys()
    parents = {key.rpartition(".")[0] for key in keys}
    assert [key for key in sorted(keys - parents) if is_computed(key) is None] == []
    rules = [*COMPUTED, *OPERATIONAL]
    assert len(rules) == len(set(rules))
    assert [rule for rule in rules if rule not in keys] == []


SAME = (
    *("max_steps=7", "strategy=ddp", "trainer.threads_per_rank=1", "rollout=hf", "resume=never", "preflight=off"),
    *("data.num_workers=1", "data.prefetch=9", "data.cache_max_gb=1", "data.decode_timeout_s=9", "data.strict=true"),
    *("module.micro_batch_tokens=512", "module/layout=padded", "module.gradient_checkpointing=true", "stages=null"),
    *(
        "rollout.engine.max_num_seqs=3",
        "rollout.engine.gpu_memory_utilization=0.3",
        "rollout.engine.max_model_len=4096",
    ),
    *("reward.workers=9", "callbacks.evaluation.every_n_steps=2", "callbacks.evaluation=null", "logger.csv=false"),
    *("callbacks.checkpoint.every_n_steps=1", "callbacks.stop.max_seconds=9", "trainer.devices=2"),
)
OTHER = (
    *("seed=1", "algorithm=rloo", "algorithm.clip_high=0.3", "model.path=x", "data.train_files=x.json", "data.fps=1"),
    *("data.max_prompt_tokens=999", "data.rollout_batch_size=8", "data.max_train_samples=3", "data.shuffle=false"),
    *("module.update_batch_size=24", "module.epochs=2", "module.optimizer.lr=1", "module.optimizer.total_steps=60"),
    *("module.frozen_parts=[merger]", "module.dtype=bfloat16", "rollout.sampling.n=4", "rollout.sampling.top_p=0.5"),
    *("reward.format_weight=0.5", "reward=shaped", "offline=mix", "debug=permuted_rewards", "callbacks.offline=null"),
    "+callbacks.mine={_target_: my.Callback}",
)


def changed(config, override):
    """The configuration with one override; only a group needs composing anew."""
    key, _, value = override.lstrip("+").partition("=")
    if key in group_names():
        return compose("train", ["experiment=tiny_cpu", override])
    copy = config.copy()
    OmegaConf.update(copy, key, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)
    return copy


def test_what_is_computed_makes_another_run_and_nothing_else_does():
    config = compose("train", ["experiment=tiny_cpu"])
    first = default_run_dir(config).name
    found = {o: default_run_dir(changed(config, o)).name for o in (*SAME, *OTHER)}
    assert [override for override in SAME if found[override] != first] == []
    assert [override for override in OTHER if found[override] == first] == []
    assert len({found[override] for override in OTHER}) == len(OTHER)


def test_the_same_name_does_not_bring_a_control_into_the_folder_of_the_real_run():
    real, control = ["experiment=tiny_cpu"], ["experiment=tiny_cpu", "debug=permuted_rewards", "name=tiny_cpu"]
    assert default_run_dir(compose("train", real)) != default_run_dir(compose("train", control))


@pytest.mark.parametrize(
    ("swept", "names"),
    [
        ("strategy=single,ddp", ["-strategy-single", "-strategy-ddp"]),
        ("trainer.devices=1,2", ["-trainer.devices-1", "-trainer.devices-2"]),
        ("data.fps=1,2", ["", ""]),
    ],
)
@pytest.mark.parametrize("fixed", [(), ("run_name=mine",), ("run_dir={tmp}/mine",)], ids=["hash", "name", "folder"])
def test_every_combination_of_a_sweep_has_a_folder_of_its_own(tmp_path, swept, names, fixed):
    fixed = tuple(text.format(tmp=tmp_path) for text in fixed)
    combinations = own_folders(expand_sweep(["experiment=tiny_cpu", f"output_dir={tmp_path}", *fixed, swept]))
    folders = [plan_run(compose("train", combination)).run_dir.name for combination in combinations]
    assert len(set(folders)) == 2
    if not fixed:
        assert [folder[len("seed0-12345678") :] for folder in folders] == names


def test_a_longer_run_continues_the_finished_one(tmp_path):
    command = ["experiment=tiny_cpu", f"output_dir={tmp_path}", "max_steps=10"]
    finished = plan_run(compose("train", command)).run_dir
    add_checkpoint(finished, 10)
    longer = plan_run(compose("train", [*command, "max_steps=20"]))
    assert (longer.run_dir, longer.start_step) == (finished, 10)


def test_the_plan_names_the_folder_and_what_tells_it_from_a_similar_run(tmp_path, capsys):
    command = ["experiment=tiny_cpu", f"output_dir={tmp_path}", "preflight=only"]
    there = plan_run(compose("train", command)).run_dir
    write_identity(compose("train", command), there)
    main([*command, "data.fps=1", "algorithm.clip_high=0.3", "data.num_workers=1"])
    output = capsys.readouterr().out
    assert f"folder: starting in {tmp_path}/tiny_cpu/seed0-" in output
    assert f"{there} differs only in algorithm.clip_high=0.3 (there 0.28), data.fps=1 (there 2.0)" in output
    main([*command, "data.num_workers=1"])
    output = capsys.readouterr().out
    assert f"folder: starting in {there}" in output
    assert "differs" not in output


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
