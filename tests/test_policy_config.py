"""Every algorithm and model config composes into a module that can be built; keys are the constructor's."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from conftest import ROOT
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.grpo import GRPOLightningModule
from lightning_modules.launch.preflight import layout_problems, method_problems
from lightning_modules.layouts.base import Layout

CONF = ROOT / "conf"


class Recurrent(Qwen3VLFamily):
    """A family whose layers carry a state from token to token."""

    name = "recurrent"
    layouts = frozenset({"padded", "packed"})
    layout_note = "responses would start from each other's state"


class Diagonal(Layout):
    """A layout that no family knows."""

    name = "diagonal"


@pytest.fixture(scope="module", autouse=True)
def _hydra():
    with initialize_config_dir(str(CONF), version_base=None):
        yield


def composed(*overrides: str):
    return compose("train", overrides=["run_dir=/tmp/none", *overrides])


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "algorithm").glob("*.yaml")))
def test_every_algorithm_builds_a_module(name):
    config = composed(f"algorithm={name}")
    module = instantiate(config.module, _convert_="all")
    assert isinstance(module, GRPOLightningModule)
    assert type(module.algorithm).__name__ == config.algorithm._target_.rsplit(".", 1)[1]
    assert module.update_settings.temperature == config.rollout.sampling.temperature


@pytest.mark.parametrize("file", sorted((CONF / "model").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_model_names_a_family(file: Path):
    config = composed(f"model={file.stem}")
    family = instantiate(config.model.family)
    assert family.layouts == {"padded", "packed", "shared_prefix"}
    assert {"parameters", "layers", "hidden", "vocabulary"} <= set(config.model.size)


@pytest.mark.parametrize("name", ["padded", "packed", "shared_prefix"])
def test_layout_is_chosen_by_name(name):
    module = instantiate(composed(f"module/layout={name}").module, _convert_="all")
    assert module.layout.name == name


def test_module_yaml_says_every_option():
    config = composed()
    options = {name for name in inspect.signature(GRPOLightningModule.__init__).parameters if name != "self"}
    assert set(config.module) - {"_target_"} == options
    optimizer = get_class(config.module.optimizer._target_)
    fields = set(inspect.signature(optimizer).parameters)
    assert set(config.module.optimizer) - {"_target_"} == fields


def test_main_experiment_says_what_the_report_lists():
    config = composed("experiment=qwen3vl_8b", "data.train_files=x.json")
    module = instantiate(config.module, _convert_="all")
    algorithm, optimizer, update = module.algorithm, module.optimizer_settings, module.update_settings
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl) == (0.2, 0.28, None)
    assert (optimizer.lr, optimizer.schedule, optimizer.weight_decay) == (1e-6, "constant", 0.01)
    assert tuple(optimizer.betas) == (0.9, 0.999)
    assert (update.update_batch_size, update.temperature) == (256, 1.0)
    assert not module.algorithm.needs.old_logprobs


@pytest.mark.parametrize(
    ("name", "algorithm", "bonus", "steps"),
    [("tiny_cpu", "GRPO", 0.05, 200), ("tiny_cpu_rloo", "RLOO", 0.015, 200), ("tiny_cpu_dapo", "DAPO", 0.05, 100)],
)
def test_demo_variants_differ_from_the_demo_where_they_say(name, algorithm, bonus, steps):
    config = composed(f"experiment={name}")
    module = instantiate(config.module, _convert_="all")
    assert type(module.algorithm).__name__ == algorithm
    assert config.module.update_options.entropy_bonus == bonus
    assert (config.max_steps, config.module.optimizer.total_steps, len(config.stages)) == (steps, steps, 5)


SHARED, PACKED = (
    "lightning_modules.layouts." + name for name in ("shared_prefix.SharedPrefixLayout", "packed.PackedLayout")
)
NOTE = "is not available for recurrent: responses would start from each other's state; use one of packed, padded"


@pytest.mark.parametrize(
    ("family", "layout", "problems"),
    [
        ("Qwen3VLFamily", SHARED, []),
        ("Recurrent", PACKED, []),
        ("Recurrent", SHARED, [f"module/layout=shared_prefix {NOTE}"]),
        ("Recurrent", f"{__name__}.Diagonal", [f"module/layout=diagonal {NOTE}"]),
        ("Recurrent", f"{__name__}.Triangle", [f"module.layout._target_={__name__}.Triangle cannot be imported"]),
        ("Nobody", PACKED, [f"model.family._target_={__name__}.Nobody cannot be imported"]),
    ],
)
def test_preflight_refuses_a_layout_that_is_not_exact(family, layout, problems):
    config = composed("experiment=tiny_cpu", f"module.layout._target_={layout}")
    OmegaConf.update(config, "model.family._target_", f"{__name__}.{family}")
    plain = OmegaConf.to_container(config, resolve=True)
    assert layout_problems(plain) == problems
    assert method_problems(plain) == problems
