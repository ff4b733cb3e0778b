"""Every algorithm makes five steps of the laptop demo with the real engine, real videos and real rewards."""

from __future__ import annotations

import math

import pytest
from test_train_survival import arguments
from train_helpers import assert_same_run, rows, run

from datamodules.common.places import option_files

NAMES = sorted(set(option_files("algorithm")) - {"supervised"})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_five_steps(tiny_assets, tmp_path, name):
    """Five steps are five updates, also where a step takes several rounds of generation."""
    run(*arguments(tiny_assets, tmp_path / "run", f"algorithm={name}", "max_steps=5"))
    logged = rows(tmp_path / "run")
    assert set(logged) - {0} == set(range(1, 6))
    for step in range(1, 6):
        assert math.isfinite(float(logged[step]["losses/policy"]))
        assert float(logged[step]["train/updates"]) == 1
        assert float(logged[step]["train/grad_norm"]) >= 0
    rates = [float(logged[step]["lr/language_model"]) for step in range(1, 6)]
    assert len(set(rates)) == 5, "the schedule moves with every step"


@pytest.mark.slow
def test_dynamic_sampling_stopped_and_continued_equals_one_run(tiny_assets, tmp_path):
    """The position in the data is that of the rounds, not of the steps."""
    # Hardly trained, the model is right about one time in a hundred: ten rounds do not always hold four such groups.
    rounds = ("algorithm.dynamic_sampling.target_groups=4", "algorithm.dynamic_sampling.max_rounds=30")
    both = ("algorithm=dapo", *rounds)
    run(*arguments(tiny_assets, tmp_path / "straight", *both, "max_steps=4"))
    for steps in (2, 4):
        run(
            *arguments(tiny_assets, tmp_path / "resumed", *both, f"max_steps={steps}", "module.optimizer.total_steps=4")
        )
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    logged = rows(tmp_path / "straight")
    assert sum(float(row.get("dynamic_sampling/rounds", 0)) for row in logged.values()) > 4
    for row in (logged[step] for step in range(1, 5)):
        assert float(row["groups/trained"]) == 4
        assert float(row["groups/zero_variance"]) == 0
