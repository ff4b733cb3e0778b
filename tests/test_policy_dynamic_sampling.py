"""DAPO's dynamic sampling: as many rounds as an update needs, one step for everything that watches."""

from __future__ import annotations

import logging

import pytest
from policy_helpers import load_processor, make_batch, mark_informative
from test_policy_update import make_module

from lightning_modules.algorithms.base import DynamicSampling
from lightning_modules.algorithms.dapo import DAPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.core.metrics import merge
from lightning_modules.update.dynamic_sampling import GroupFilter, _fair_shares, merge_timings


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    return load_processor(tiny_model_dir)


def rounds(processor, *wanted):
    """One batch per argument; prompts of round r are s<r>.<i>."""
    batches = []
    for number, flags in enumerate(wanted):
        batch = mark_informative(make_batch(processor, ("text",) * len(flags), seed=number), flags)
        batch.rl_step = number
        batch.lost = [(f"lost{number}", "unreadable")] if number else []
        batches.append(batch)
    return batches


def fill(batches, **sampling):
    """(batch, rounds drawn, batches left) after filling from `batches`."""
    first, *rest = batches
    drawn = GroupFilter(DAPO(dynamic_sampling=DynamicSampling(**sampling))).fill(
        first, lambda limit: rest.pop(0) if rest else None
    )
    return first, drawn, rest


def test_rounds_are_drawn_until_the_update_is_full_and_no_longer(processor):
    batches = rounds(processor, (1, 0, 0), (0, 1, 1), (1, 1, 1))
    expected = [batches[0].groups[0], batches[1].groups[1], batches[1].groups[2]]
    batch, drawn, rest = fill(batches)
    assert (drawn, len(rest)) == (2, 1), "the target is the three prompts of a round"
    assert [group.responses for group in batch.groups] == [group.responses for group in expected]
    assert [group.index for group in batch.groups] == [0, 1, 2]
    assert [prompt.uid for prompt in batch.prompts] == [group.uid for group in expected]
    assert all([score.accuracy for score in scores] == [1.0, 0.0, 0.0] for scores in batch.scores)
    assert batch.lost == [("lost1", "unreadable")]
    # Round accuracies 1/9 and 2/9; 3 of 6 groups kept, none too many.
    wanted = {"rounds": 2.0, "prompts": 6.0, "kept_fraction": 0.5, "accuracy": pytest.approx(3 / 18), "dropped": 0.0}
    assert {k.split("/")[1]: v for k, v in batch.metrics.items()} == wanted


def test_a_full_batch_draws_nothing_and_surplus_is_dropped(processor):
    batch, drawn, rest = fill(rounds(processor, (1, 1), (1, 1)))
    assert (drawn, len(rest), len(batch.groups)) == (1, 1, 2)
    batch, drawn, _ = fill(rounds(processor, (1, 1, 1)), target_groups=2)
    assert (drawn, len(batch.groups), batch.metrics["dynamic_sampling/dropped"]) == (1, 2, 1.0)


def test_a_further_round_asks_for_what_is_missing(processor):
    """At the step's rate so far, and a quarter more."""
    batches, asked = rounds(processor, (1, 1, 1, 0), (0,), (1, 1)), []
    first, rest = batches[0], batches[1:]
    sampling = DynamicSampling(target_groups=5)
    GroupFilter(DAPO(dynamic_sampling=sampling)).fill(first, lambda limit: asked.append(limit) or rest.pop(0))
    # 2 missing at 3 of 4: 1.25 * 2 * 4 / 3 = 3.33; then 2 missing at 3 of 5: 1.25 * 2 * 5 / 3 = 4.17.
    assert asked == [4, 5]
    batches, asked = rounds(processor, (0, 0), (1, 0)), []
    sampling = DynamicSampling(target_groups=1)
    GroupFilter(DAPO(dynamic_sampling=sampling)).fill(batches[0], lambda limit: asked.append(limit) or batches[1])
    assert asked == [3], "nothing found yet: as if it had been one"


def test_the_bound_ends_the_search_with_what_is_there(processor, caplog):
    with caplog.at_level(logging.WARNING):
        batch, drawn, rest = fill(rounds(processor, (0, 0), (1, 0), (1, 1)), max_rounds=2)
    assert (drawn, len(rest), len(batch.groups)) == (2, 1, 1)
    assert "1 of 2 groups after 2 rollout batches" in caplog.text
    batch, drawn, _ = fill(rounds(processor, (1, 0)))
    assert (drawn, len(batch.groups)) == (1, 1), "the data ended"


def test_a_hopeless_search_stops_the_run(processor):
    with pytest.raises(RuntimeError, match=r"2 rollout batches held no group.*max_rounds.*dynamic_sampling=null"):
        fill(rounds(processor, (0, 0), (0, 0), (1, 1)), max_rounds=2)
    with pytest.raises(ValueError, match="GRPO has no dynamic sampling"):
        GroupFilter(GRPO())


def test_a_filled_batch_is_one_step_on_the_informative_groups(tiny_model_dir, processor):
    module = make_module(tiny_model_dir, algorithm=DAPO(dynamic_sampling=DynamicSampling(target_groups=3)))
    batch, _, _ = fill(rounds(processor, (1, 0), (1, 1)), target_groups=3)
    module.update(batch, module.configure_optimizers()["optimizer"])
    assert (module.rl_step, module.weights_version) == (1, 1)
    assert module.step_metrics["groups/trained"] == 3
    assert module.step_metrics["groups/zero_variance"] == 0
    assert module.step_metrics["train/updates"] == 1


def test_scalars_of_several_rounds():
    first = {"generate": 2.0, "score": 1.0, "score_busy": 2.0, "score_overlap": 0.5}
    second = {"generate": 3.0, "score": 0.0, "score_busy": 2.0, "score_overlap": 1.0, "sync": 0.5}
    assert merge_timings([first, second]) == {
        "generate": 5.0,
        "score": 1.0,
        "score_busy": 4.0,
        "score_overlap": 0.75,
        "sync": 0.5,
    }
    metrics = merge([{"a_count": 1.0, "b_max": 3.0, "c": 1.0}, {"a_count": 2.0, "b_max": 2.0, "c": 2.0}])
    assert metrics == {"a_count": 3.0, "b_max": 3.0, "c": 1.5}


def test_surplus_groups_are_taken_from_the_fullest_rank():
    assert _fair_shares([5, 2], 4) == [2, 2]
    assert _fair_shares([1, 6, 2], 5) == [1, 2, 2]
    assert _fair_shares([1, 2], 9) == [1, 2]
