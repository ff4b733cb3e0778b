"""What the command line answers to mistakes, before anything heavy starts, and the plan of the large run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from datamodules.common.places import option_files
from lightning_modules.launch.cli import main
from lightning_modules.launch.config import compose, expand_sweep, nearest
from lightning_modules.launch.preflight import plan_lines

EXPERIMENTS = sorted(option_files("experiment"))


def answer(capsys, *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["experiment=tiny_cpuu"], "experiment=tiny_cpuu does not exist; did you mean tiny_cpu"),
        (["experiment=tiny_cpu", "algorithm=grop"], "algorithm=grop does not exist; did you mean grpo"),
        (
            ["experiment=tiny_cpu", "algorithm.clip_hihg=0.3"],
            "unknown config key 'algorithm.clip_hihg'; did you mean alg",
        ),
        (["experiment=tiny_cpu", "algorithm=null"], "algorithm=null: a name is expected, one of cispo, "),
        (["experiment=tiny_cpu", "strategy={a:1}"], "a name is expected, one of ddp, fsdp, single"),
        (["experiment=tiny_cpu", "rollout.sampling.top_p=0"], "top_p=0 must lie in (0, 1]"),
        (["experiment=tiny_cpu", "module.lr=1e-3"], "unknown config key 'module.lr'; did you mean module.optimizer.lr"),
        (["experiment=tiny_cpu", "seed=["], "cannot read the command line"),
        (["experiment=tiny_cpu", "module.optimizer.lr=fast"], "module.optimizer.lr=fast: a number is expected"),
        (["experiment=tiny_cpu", "max_steps=ten"], "max_steps=ten: a whole number of at least 1 is expected"),
        (["experiment=tiny_cpu", "max_steps=2.5"], "max_steps=2.5: a whole number of at least 1 is expected"),
        (["experiment=tiny_cpu", "data.strict=maybe"], "data.strict=maybe: true or false is expected"),
        (["experiment=tiny_cpu", "preflight=onyl"], "preflight=onyl is unknown; did you mean only"),
        (["experiment=tiny_cpu", "trainer.accelerator=gpuu"], "trainer.accelerator=gpuu is unknown; did you mean gpu"),
        (["experiment=tiny_cpu", "trainer.devices=512"], "trainer.devices=512, but this machine has"),
        (
            ["experiment=tiny_cpu", "data.train_files=/nowhere/x.json"],
            "data.train_files: /nowhere/x.json does not exist",
        ),
        (["experiment=tiny_cpu", "data.media_root=/nowhere"], "data.media_root=/nowhere is not a folder"),
        (["experiment=tiny_cpu", "model.path=/nowhere/model"], "model.path=/nowhere/model does not exist"),
        (
            ["experiment=tiny_cpu", "strategy=fsdp", "trainer.devices=2", "data.rollout_batch_size=7"],
            "data.rollout_batch_size=7 does not divide among 2 ranks; use 8",
        ),
        (
            ["experiment=tiny_cpu", "offline=mix", "algorithm=reinforce_pp", "rollout.sampling.n=1"],
            "offline: rollout.sampling.n=1: an answer from elsewhere needs at least one own answer beside it",
        ),
        (["experiment=tiny_cpu", "offline=mix", "offline.ratio.start=2.0"], "offline: "),
        (["experiment=tiny_cpu", "trainer.devices=2"], "strategy=single uses one device"),
        (["experiment=tiny_cpu", "module.update_batch_size=9"], "is not a multiple of module.update_batch_size=9"),
        (
            ["experiment=tiny_cpu", "rollout.sampling.n=1"],
            "rollout.sampling.n=1: GRPO compares the responses of one prompt",
        ),
        (
            ["experiment=tiny_cpu", "algorithm=passk", "rollout.sampling.n=3"],
            "PassK compares the responses of one prompt an",
        ),
        (["experiment=tiny_cpu", "algorithm.clip_low=1.5"], "algorithm: clip_low=1.5 must lie in [0, 1)"),
        (
            ["experiment=tiny_cpu", "data.cache_codec=losless"],
            "cache_codec=losless is unknown; did you mean lossless",
        ),
        (["experiment=tiny_cpu", "data.max_prompt_tokens=2040"], "exceed rollout.engine.max_model_len=2048; use 2050"),
        (["experiment=tiny_cpu", "resume=/nowhere"], "resume=/nowhere: no complete checkpoint"),
        (["experiment=tiny_cpu", "max_steps=0"], "max_steps=0: a whole number of at least 1 is expected"),
        (["experiment=qwen3vl_8b"], "data.train_files is not set: add data.train_files=..."),
        (["--mutirun"], "unknown flag --mutirun"),
    ],
)
def test_a_mistake_is_answered_in_words_with_exit_code_two(capsys, tmp_path, arguments, expected):
    code, output = answer(capsys, *arguments, *([f"output_dir={tmp_path}"] if arguments[0][0] != "-" else []))
    assert code == 2
    assert expected in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


def test_vllm_missing_is_said_before_anything_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)  # how Python marks a module that cannot be imported
    code, output = answer(capsys, "experiment=tiny_cpu", f"output_dir={tmp_path}")
    assert code == 2
    assert "vLLM is not installed" in output
    assert "rollout=hf" in output


def test_several_problems_are_listed_together(capsys, tmp_path):
    code, output = answer(
        capsys, "experiment=tiny_cpu", "data.train_files=/no/x.json", "trainer.devices=512", f"output_dir={tmp_path}"
    )
    assert code == 2
    assert "/no/x.json does not exist" in output
    assert "trainer.devices=512" in output


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_prints_its_plan(name):
    from omegaconf import OmegaConf

    config = compose("train", [f"experiment={name}"])
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "x.json")
    lines = plan_lines(OmegaConf.to_container(config, resolve=True))
    assert lines[0].startswith(f"plan of {name}:")


def test_plan_of_the_large_run_says_what_the_report_lists(capsys):
    code, output = answer(capsys, "experiment=qwen3vl_8b", "preflight=only")
    assert code == 1  # this machine lacks 32 GPUs, the model and the data
    assert "ranks: 32 = 4 nodes x 8 (gpu), strategy fsdp" in output
    assert "prompts: 256 per step, 8 per rank; rollouts: n=8, 2048 per step, 64 per rank" in output
    assert "one update per step, the clip range is inert" in output
    assert "16 groups of tensor-parallel size 2" in output
    # 128 frames in pairs, 262,144 pixels at 32 x 32 per token: 64 * 256 tokens.
    assert "video prompt up to 16,384 visual tokens (128 frames of 262,144 pixels), response up to 4,096" in output
    assert "unvalidated" in output
    # Every group fits: 18,432 + 8 * 4,096 = 51,200.
    assert "a group that shares its prompt up to 51,200 instead of 180,224" in output
    assert "is split and repeats its prompt" not in output
    assert "does not fit" not in output
    assert "missing on this machine: data.train_files is not set" in output


def test_the_large_run_has_the_reports_settings():
    config = compose("train", ["experiment=qwen3vl_8b", "data.train_files=x.json"])
    assert config.model.path == "Qwen/Qwen3-VL-8B-Instruct"
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.get("kl") is None
    assert (config.rollout.sampling.n, config.rollout.sampling.temperature) == (8, 1.0)
    assert config.rollout.sampling.max_tokens == 4096
    assert (config.data.rollout_batch_size, config.module.update_batch_size) == (256, 256)
    optimizer = config.module.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.weight_decay) == (1e-6, "constant", 0.01)
    assert list(optimizer.betas) == [0.9, 0.999]
    assert (config.data.fps, config.data.max_frames) == (2.0, 128)
    assert (config.data.video_max_pixels, config.data.image_max_pixels) == (262144, 1048576)
    assert (config.trainer.num_nodes, config.trainer.devices, config.max_steps) == (4, 8, 200)
    assert config.rollout.engine.tensor_parallel_size == 2
    assert config.module.gradient_checkpointing


def test_sweeps_expand_to_one_command_each():
    assert expand_sweep(["a=1,2", "b=x"]) == [["a=1", "b=x"], ["a=2", "b=x"]]


def test_nearest_puts_the_right_key_at_another_place_first():
    assert nearest("module.lr", ["module.optimizer.lr", "data.fps"]) == "; did you mean module.optimizer.lr?"
    assert nearest("zzz", ["a", "b"]) == "; valid: a, b"


def test_an_interrupt_while_the_settings_are_checked_is_no_traceback(capsys, monkeypatch, tmp_path):
    cores = os.sched_getaffinity

    def ask_and_interrupt(pid: int) -> set[int]:
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while the preflight counts the machine's cores
        return cores(pid)

    monkeypatch.setattr(os, "sched_getaffinity", ask_and_interrupt)
    code, output = answer(capsys, "experiment=tiny_cpu", f"output_dir={tmp_path}")
    assert code == 130
    assert "stopped before training; nothing was changed, the same command starts again" in output
    assert list(tmp_path.iterdir()) == []


DROPPED_INTERRUPT = """
import gc, os, signal
import lightning as L
from lightning_modules.callbacks.stop import StopCallback
from lightning_modules.state.stop_flag import remember_interrupt

class Careless:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)  # exceptions in destructors are printed and dropped

remember_interrupt()
Careless()
gc.collect()
callback = StopCallback(max_steps=1)
trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
callback.setup(trainer, L.LightningModule(), "fit")
callback.on_train_start(trainer, L.LightningModule())
print(callback.stopped_by_user, trainer.should_stop)
"""


def test_an_interrupt_that_python_drops_during_start_up_still_stops_the_run():
    run = subprocess.run(
        [sys.executable, "-c", DROPPED_INTERRUPT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "KeyboardInterrupt" in run.stderr
    assert run.stdout.split() == ["True", "True"]
