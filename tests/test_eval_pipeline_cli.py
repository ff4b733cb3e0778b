"""The command line: every driver composes, typos name the nearest key, mistakes are said before any work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import ROOT

from datamodules.common.places import option_files
from lightning_modules.launch.benchmarks import _options, print_list
from lightning_modules.launch.config import ConfigError, build, compose, to_plain
from lightning_modules.launch.evaluate_cli import _run


@pytest.mark.parametrize("driver", sorted(option_files("driver")))
def test_every_driver_composes_and_builds(driver):
    config = compose("evaluate", [f"driver={driver}", "model_path=/m", "benchmarks=all"])
    engine = to_plain(config.driver)["engine"]
    assert engine["model_path"] == "/m"
    assert {"dtype", "max_model_len"} <= set(engine)
    assert callable(build(config.driver))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle=x", "benchmark=all"], "unknown config key 'modle'; did you mean .*model"),
        (["model=x", "benchmark=all", "frames.max_frame=3"], "did you mean frames.max_frames"),
        (["model=x"], "benchmark is not set"),
        (["benchmark=all"], "model is not set"),
        (["lst"], "unknown command 'lst'; did you mean list"),
        (["run=x", "rn=y"], "unknown option 'rn'; did you mean run"),
        (["model=x", "benchmark=videomm", "data_root=/d"], "did you mean videomme"),
        (["model=x", "benchmark=videomme"], "data_root is not set"),
        (["model=x", "benchmark=videomme", "stage=scor"], "stage=scor is unknown; use one of all, prepare"),
        (["model=/no/such", "benchmark=videomme", "data_root=/d"], "/no/such holds no config.json"),
        (["model=x", "benchmark=videomme", "driver=asinc"], "driver=asinc does not exist; did you mean async"),
    ],
)
def test_mistakes_are_one_line_with_the_way_out(arguments, message):
    with pytest.raises(ConfigError, match=message):
        _run(arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("prepare.decoder=pyavv", "decoder=pyavv is unknown; did you mean pyav"),
        ("prepare.cache_codec=jpg", "cache_codec=jpg is unknown; did you mean jpeg"),
        ("frames.fps=0", "fps=0 must be positive"),
        ("frames.max_frames=many", "frames.max_frames=many: a whole number, a number or null is expected"),
        ("images.max_pixels=3", "image max_pixels=3 is less than min_pixels"),
        ("limit=-1", "limit=-1: a number of items is expected"),
        ("limit=few", "limit=few: a whole number or null is expected"),
        ("style=offical", "prompt style 'offical': use one of cot, official, qwen3vl"),
        ("frame_policy=fast", "frame policy 'fast': use one of official"),
        ("benchmark=[]", "no benchmark is named"),
        ("baseline=/nope", "baseline=/nope does not exist"),
        ("report_items=-1", "report_items=-1 is negative"),
        ("reward=judge", "base_url"),
    ],
)
def test_values_that_cannot_work_are_refused_before_any_file_is_written(tiny_model_dir, tmp_path, argument, message):
    given = [f"model={tiny_model_dir}", f"data_root={tmp_path}", f"output_dir={tmp_path / 'out'}", "driver=tiny"]
    benchmark = [] if argument.startswith("benchmark=") else ["benchmark=videomme"]
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        _run([*given, *benchmark, "sampling.max_tokens=8", argument])
    assert not (tmp_path / "out").exists()


def test_options_reach_the_run(tiny_model_dir):
    config = compose(
        "evaluate",
        [f"model_path={tiny_model_dir}", "benchmarks=videomme", "data_root=/d", "driver=tiny", "frames.fps=1"],
    )
    config.sampling.max_tokens = 100
    options, settings = _options(config, to_plain(config))
    assert options.sampling.temperature == 0
    assert options.sampling.stop_ids
    assert options.engine_key == {"dtype": "float32", "max_model_len": 2048}

    prepare = settings(SimpleNamespace(frames={"max_frames": 64}))
    assert prepare.max_prompt_tokens == 1948
    assert prepare.key()["frames"] == {"max_frames": 64, "fps": 1, "decoder": "pyav"}
    config.sampling.max_tokens = 4096
    with pytest.raises(ConfigError, match="max_model_len=2048 leaves no room"):
        _options(config, to_plain(config))


def test_list_shows_every_benchmark_and_its_data(tmp_path, caplog):
    import logging

    with caplog.at_level(logging.INFO, logger="evaluate"):
        assert print_list(str(tmp_path)) == 0
    names = {path.stem for path in (ROOT / "conf" / "benchmark").glob("*.yaml")}
    assert len(names) >= 22
    assert {line.split()[0] for line in caplog.messages[1:]} == names
    assert all("missing" in line for line in caplog.messages[1:])
