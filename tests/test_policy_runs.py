"""Every algorithm makes five steps of the laptop demo with the real engine, real videos and real rewards."""

from __future__ import annotations

import math

import pytest
from conftest import ROOT
from test_train_survival import arguments
from train_helpers import rows, run

NAMES = sorted(p.stem for p in (ROOT / "conf" / "algorithm").glob("*.yaml") if p.stem != "supervised")

# Eight prompts with different rewards rarely come together in five small steps; one is enough for an update here.
MORE = {"dapo": ["algorithm.dynamic_sampling.target_groups=1"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_five_steps(tiny_assets, tmp_path, name):
    run(*arguments(tiny_assets, tmp_path / "run", f"algorithm={name}", "max_steps=5", *MORE.get(name, ())))
    logged = rows(tmp_path / "run")
    assert set(range(1, 6)) <= set(logged)
    losses = [float(row["losses/policy"]) for row in logged.values() if row.get("losses/policy")]
    assert losses, "at least one update"
    assert all(math.isfinite(loss) for loss in losses)
