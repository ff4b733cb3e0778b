"""Every algorithm and model config composes into a module that can be built; keys are the constructor's."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import pytest
import yaml
from conftest import ROOT
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from datamodules.common.places import option_files
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.launch.preflight import layout_problems, method_problems
from lightning_modules.launch.settings import keywords
from lightning_modules.layouts.base import Layout
from lightning_modules.modules.rl import GRPOLightningModule
from lightning_modules.update.settings import UpdateSettings

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


@pytest.mark.parametrize("name", sorted(option_files("algorithm")))
def test_every_algorithm_builds_a_module(name):
    config = composed(f"algorithm={name}")
    module = instantiate(config.module, _convert_="all")
    assert isinstance(module, GRPOLightningModule)
    assert type(module.algorithm).__name__ == config.algorithm._target_.rsplit(".", 1)[1]
    assert module.update_settings.temperature == config.rollout.sampling.temperature


@pytest.mark.parametrize("name", sorted(option_files("model")))
def test_every_model_names_a_family(name):
    config = composed(f"model={name}")
    family = instantiate(config.model.family)
    assert family.layouts == {"padded", "packed", "shared_prefix"}
    assert {"parameters", "layers", "hidden", "vocabulary"} <= set(config.model.size)


@pytest.mark.parametrize("name", ["padded", "packed", "shared_prefix"])
def test_layout_is_chosen_by_name(name):
    module = instantiate(composed(f"module/layout={name}").module, _convert_="all")
    assert module.layout.name == name


def test_module_yaml_says_every_option():
    config = composed()
    options, more = keywords(GRPOLightningModule)
    assert not more
    assert set(config.module) - {"_target_"} == set(options) - {"clip_norm"}  # the optimizer's
    for field in dataclasses.fields(UpdateSettings):
        if field.name not in ("clip_norm", "temperature"):
            assert config.module[field.name] == field.default, field.name
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
    assert config.module.entropy_bonus == bonus
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


_base = functools.cache(composed)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["module.epochs=0"], "module.epochs=0 must be at least 1"),
        (["module.update_batch_size=0"], "module.update_batch_size=0 must be at least 1, or null for all"),
        (["module.micro_batch_tokens=-1"], "module.micro_batch_tokens=-1 must be at least 1"),
        (["module.logprob_chunk=-3"], "module.logprob_chunk=-3 must be at least 1"),
        (["module.dtype=float16"], "module.dtype='float16': choose float32 or bfloat16"),
        (["module.frozen_parts=[eyes]"], "module.frozen_parts names ['eyes']; the parts of a model are"),
        (["module.frozen_parts=[vision_tower,merger,language_model]"], "leaves nothing to train"),
        (["module.optimizer.lr=-1"], "module.optimizer: lr=-1 is negative"),
        (["module.optimizer.schedule=step"], "module.optimizer: schedule='step' is unknown; choose constant"),
        (["module.mismatch_gate.patience=0"], "module.mismatch_gate: patience=0 must be at least 1"),
        (["rollout.sampling.temperature=0"], "module.temperature=0: training needs samples of a positive temperature"),
        (["module.temperature=0.5"], "module.temperature=0.5 but rollout.sampling.temperature=1.0; leave"),
        (["rollout.sampling.n=0"], "rollout.sampling: n=0: at least one response per prompt"),
        (["algorithm=grpo_kl", "algorithm.kl.kind=k9"], "algorithm.kl: kl kind='k9' is unknown; choose one of k1"),
        (["algorithm=supervised"], "Supervised learns from given answers, not from rewards of the policy's own"),
        (["experiment=tiny_sft", "algorithm=rloo"], "RLOO learns from rewards, which given answers do not differ in"),
        (
            ["algorithm=dapo", "algorithm.dynamic_sampling.target_groups=481"],
            "target_groups=481 is more than max_rounds=10 batches of data.rollout_batch_size=48 hold; use at most 480",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(overrides, problem):
    groups = tuple(override for override in overrides if "." not in override.partition("=")[0])
    first = () if groups and groups[0].startswith("experiment") else ("experiment=tiny_cpu",)
    config = _base(*first, *groups).copy()
    for override in overrides[len(groups) :]:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    (found,) = method_problems(OmegaConf.to_container(config, resolve=True))
    assert problem in found
