"""A value of the wrong kind is refused for every key of every configuration, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from datamodules.common.places import CONF_DIR, option_files
from lightning_modules.launch.config import ConfigError, compose
from lightning_modules.launch.settings import keywords, problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from omegaconf import DictConfig

    Kind, Part = str, object

WORD = "wrong_word"
FREE_TEXT = {
    *("name", "resume", "output_dir", "run_name", "run_dir", "assets_dir", "config_dir", "model.path"),
    *("assets.folder", "data.model_path", "data.train_files", "data.val_files", "data.media_root", "data.cache_dir"),
    *("data.artifact_dir", "data.stage_dir", "data.prompt_templates", "data.system_prompt", "data.order.key"),
    *("data.order.rates_file", "module.model_path", "module.dump_dir", "module.export_to", "module.target_format"),
    *("rollout.engine.model_path", "rollout.engine.dtype", "rollout.engine.attn_implementation"),
    *("reward.routes.open ended.markers.VideoReasonBench", "callbacks.engine.model_path"),
    *("callbacks.rollout_table.run_dir", "callbacks.evaluation.run_dir", "callbacks.evaluation.best_metric"),
    *("callbacks.checkpoint.run_dir", "driver.engine.model_path", "driver.engine.dtype", "driver.address"),
    *(
        f"callbacks.evaluation.slices.{key}"
        for key in ("data_root", "model_path", "style", "frame_policy", "cache_dir")
    ),
    "callbacks.evaluation.slices.benchmarks",
    *("driver.engine.attn_implementation", "model_path", "benchmarks", "data_root", "model_name"),
    *("stage", "style", "frame_policy", "split", "source", "prepare.cache_dir", "baseline"),
}
"""Keys that hold any text: paths, names, words that only their reader knows."""


def leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys of everything that is not a mapping with keys of its own."""
    for name in node:
        child = node._get_node(name)
        if OmegaConf.is_dict(child) and not child._is_none() and not child._is_interpolation() and len(child):
            yield from leaves(child, f"{prefix}{name}.")
        elif not str(name).startswith("_"):
            yield f"{prefix}{name}"


COMPOSED = [
    *(("train", [f"experiment={name}"]) for name in sorted(option_files("experiment"))),
    ("train", ["data=synthetic_curriculum", "algorithm=grpo_kl", "offline=prefix", "rollout=hf", "strategy=fsdp"]),
    ("train", ["data=curriculum", "algorithm=dapo", "offline=replay", "callbacks=benchmarks", "reward=thinking"]),
    *(("evaluate", [f"driver={name}"]) for name in sorted(option_files("driver"))),
]


@pytest.mark.parametrize(("entry", "overrides"), COMPOSED, ids=lambda value: str(value))
def test_a_word_is_refused_wherever_no_text_belongs(entry, overrides):
    config = compose(entry, overrides)  # nothing to say about it as it is
    keys = list(leaves(config))
    OmegaConf.set_struct(config, False)
    for key in keys:
        OmegaConf.update(config, key, WORD, merge=False)
    named = {problem.text.partition("=")[0] for problem in problems(entry, config)}
    assert set(keys) - named <= FREE_TEXT


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_train_samples=many", "data.max_train_samples=many: a whole number or null is expected"),
        ("data.max_train_samples=2.5", "data.max_train_samples=2.5: a whole number or null is expected"),
        ("data.max_train_samples=true", "data.max_train_samples=true: a whole number or null is expected"),
        ("data.fps=true", "data.fps=true: a number is expected"),
        ("data.shuffle=1", "data.shuffle=1: true or false is expected"),
        ("data.prompt_overrides=[a]", "data.prompt_overrides=['a']: a mapping or null is expected"),
        ("data.cache_codec=losless", "data.cache_codec=losless is unknown; did you mean lossless?"),
        ("module.optimizer.betas=[0.9,high]", "module.optimizer.betas=[0.9, 'high']: a list is expected"),
        ("module.optimizer.part_lr={merger: high}", "module.optimizer.part_lr.merger=high: a number is expected"),
        ("module.epochs=null", "module.epochs=null: a whole number is expected"),
        ("module.importance.mode=mask", "unknown config key 'module.importance.mode'"),
        ("module.importance={mode: mask}", "module.importance={'mode': 'mask'}: a node with _target_ or null is"),
        ("module.update_options={entropy_bonus: 0.1}", "module.update_options is gone: its keys are keys of"),
        ("module.update_options.entropy_bonus=0.1", "did you mean module.entropy_bonus"),
        ("rollout.sampling.n=eight", "rollout.sampling.n=eight: a whole number is expected"),
        ("rollout.engine.tensor_parallel_size=0", "tensor_parallel_size=0: a whole number of at least 1 is expected"),
        ("trainer.devices=-2", "trainer.devices=-2: a whole number of at least 1 is expected"),
        ("callbacks.stop=yes", "callbacks.stop=yes: a node with _target_ or null is expected"),
        ("+data.foo=1", "unknown config key 'data.foo'"),
        ("+data.max_frame=1", "unknown config key 'data.max_frame'; did you mean data.max_frames"),
        ("+foo=1", "unknown config key 'foo'"),
        ("+max_step=1", "unknown config key 'max_step'; did you mean max_steps"),
        ("+algorithm.k=4", "unknown config key 'algorithm.k'"),
        ("+rollout.engine.sede=4", "unknown config key 'rollout.engine.sede'"),
        ("+reward.routes.ocr.cased=true", "unknown config key 'reward.routes.ocr.cased'"),
        ("+trainer.device=2", "unknown config key 'trainer.device'; did you mean trainer.devices"),
    ],
)
def test_the_answer_names_the_key_the_value_and_what_is_wanted(override, message):
    with pytest.raises(ConfigError) as error:
        compose("train", ["experiment=tiny_cpu", override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.fps=2",  # a whole number is a number
        "module.optimizer.betas=[0.8,0.9]",  # a list is a tuple
        "module.optimizer.part_lr={}",
        "offline.ratio.end=0",
        "+rollout.engine.extra_options.anything=[goes]",  # passed on as it is
        "+algorithm.max_tokens=100",  # an argument that the option file leaves out
        "+rate=0.001 module.optimizer.lr=${rate}",  # a key that another one reads
        "run_name=7",
        "data.train_files=x.json",
        "callbacks.evaluation=null",
        "model.size=null",  # a model of one's own may say nothing about its size
    ],
)
def test_what_fits_is_taken(override):
    assert compose("train", ["experiment=tiny_mix_policy", *override.split(" ")]).name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["frames.max_frames=many"], "frames.max_frames=many: a whole number, a number or null is expected"),
        (["frames=many"], "frames=many: a mapping or null is expected"),
        (["limit=few"], "limit=few: a whole number or null is expected"),
        (["+prepare.process=2"], "unknown config key 'prepare.process'; did you mean prepare.processes"),
        (["+driver.replica=2"], "unknown config key 'driver.replica'; did you mean driver.replicas"),
        (["driver=tiny", "driver.engine.max_num_seqs=all"], "driver.engine.max_num_seqs=all: a whole number is"),
    ],
)
def test_evaluation_answers_the_same_way(overrides, message):
    with pytest.raises(ConfigError) as error:
        compose("evaluate", ["model_path=/m", "benchmarks=all", *overrides])
    assert message in str(error.value)


@dataclass
class Inner:
    """What the keywords go on to."""

    depth: int = 1


class Base:
    """The end of a chain of constructors."""

    def __init__(self, size: int, names: Sequence[str] = (), place: Path | None = None) -> None: ...


class Derived(Base):
    """Hands its keywords to the base."""

    def __init__(self, rates: Mapping[str, float] | None = None, **base: object) -> None: ...


class Unknown:
    """Annotated with names that exist for type checkers only."""

    def __init__(self, kind: Kind = "a", part: Part | None = None, other: Kind | None = None) -> None: ...


class Handing:
    """Hands its keywords to a dataclass."""

    forwards_to = Inner

    def __init__(self, width: int, **inner: object) -> None: ...


def test_keywords_follow_what_a_constructor_hands_on():
    found, more = keywords(Derived)
    assert (list(found), more) == (["rates", "size", "names", "place"], False)
    assert (set(keywords(Handing)[0]), keywords(Handing)[1]) == ({"width", "depth"}, False)
    assert keywords(lambda known=1, **other: None)[1]


def test_a_name_for_type_checkers_is_a_component_unless_the_default_is_plain():
    config = OmegaConf.create({"x": {"_target_": f"{__name__}.Unknown", "kind": "b", "part": "word"}})
    (problem,) = problems("", config)
    assert problem.text == "x.part=word: a node with _target_ or null is expected"


def test_base_files_are_not_options():
    assert all(not name.startswith("_") for group in ("algorithm", "model") for name in option_files(group))
    assert (CONF_DIR / "algorithm" / "_base.yaml").is_file()
    with pytest.raises(ConfigError, match="algorithm=_base does not exist"):
        compose("train", ["algorithm=_base"])
