"""The command line: every driver composes, typos name the nearest key, mistakes are said before any work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import ROOT

from lightning_modules.launch.benchmarks import _options, print_list
from lightning_modules.launch.config import ConfigError, build, compose, to_plain
from lightning_modules.launch.evaluate_cli import _run


@pytest.mark.parametrize("driver", sorted(path.stem for path in (ROOT / "conf" / "driver").glob("*.yaml")))
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
