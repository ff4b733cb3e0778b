"""Schedules, clipping and reductions by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_modules.core.metrics import MetricBag
from lightning_modules.update.optim import OptimizerSettings, clip_gradients, schedule_factor


def factors(**settings):
    s = OptimizerSettings(**settings)
    return [round(schedule_factor(step, s), 6) for step in range(9)]


def test_schedules_by_hand():
    assert factors(warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    assert factors(schedule="linear", total_steps=8, warmup_steps=4, floor=0.2) == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        0.8,
        0.6,
        0.4,
        0.2,
    ]
    cosine = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    assert factors(schedule="cosine", total_steps=8) == [round(c, 6) for c in cosine]


def test_bad_settings():
    with pytest.raises(ValueError, match="total_steps"):
        OptimizerSettings(schedule="cosine")
    with pytest.raises(ValueError, match=r"part_lr names \['eyes'\]"):
        OptimizerSettings(part_lr={"eyes": 1.0})
    with pytest.raises(ValueError, match="clip_norm=0"):
        OptimizerSettings(clip_norm=0)
    for wrong in ({"lr": -1}, {"eps": -1}, {"weight_decay": -1}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match="{}={}".format(*next(iter(wrong.items())))):
            OptimizerSettings(**wrong)
    with pytest.raises(ValueError, match=r"part_lr\.merger=-1"):
        OptimizerSettings(part_lr={"merger": -1})
    for betas in ([0.9], [0.9, 1.0]):
        with pytest.raises(ValueError, match=r"betas=\[0\.9.*two numbers"):
            OptimizerSettings(betas=betas)
    with pytest.raises(ValueError, match="got -5"):
        OptimizerSettings(schedule="linear", total_steps=-5)


def test_clipping_by_hand():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], None) == 5.0
    assert a.grad.item() == 3.0
    assert clip_gradients([a, b], 1.0) == 5.0
    assert a.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert clip_gradients([torch.nn.Parameter(torch.zeros(1))], 1.0) == 0.0


def test_metric_reductions():
    bag = MetricBag()
    bag.mean("loss", 3.0, count=2)
    bag.mean("loss", 1.0)
    bag.mean("nothing", 5.0, count=0)
    bag.add("tokens", 4)
    bag.add("tokens", 5)
    bag.max("top", -3)
    bag.max("top", -7)
    bag.min("low", 2)
    bag.min("low", 1)
    bag.correlation("r", torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    bag.correlation("r", torch.tensor([3.0]), torch.tensor([5.0]))
    got = bag.reduce()
    assert got["loss"] == pytest.approx(7 / 3)
    assert (got["tokens"], got["top"], got["low"]) == (9, -3, 1)
    assert "nothing" not in got
    # x = 1, 2, 3 and y = 2, 4, 5: covariance 1.5, standard deviations 1 and sqrt(7/3).
    assert got["r"] == pytest.approx(1.5 / math.sqrt(7 / 3))
