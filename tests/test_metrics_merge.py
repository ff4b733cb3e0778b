"""Scalars of several ranks become the job's; expected values by hand."""

from __future__ import annotations

import pytest

from lightning_modules.core.metrics import merge


def test_means_count_every_answer_once_however_they_lie_on_the_ranks():
    parts = [
        {"reward/boolean/accuracy_mean": 1.0, "reward/boolean/answers_count": 1.0, "rollout/response_length_max": 4.0},
        {"reward/boolean/accuracy_mean": 0.2, "reward/boolean/answers_count": 3.0, "rollout/response_length_max": 9.0},
        {"rollout/response_length_max": 2.0},  # a rank without such a task
    ]
    assert merge(parts) == {
        "reward/boolean/accuracy_mean": pytest.approx((1.0 + 3 * 0.2) / 4),
        "reward/boolean/answers_count": 4.0,
        "rollout/response_length_max": 9.0,
    }


def test_values_without_a_count_are_averaged_over_the_ranks_that_have_them():
    assert merge([{"time/step_s": 2.0}, {"time/step_s": 4.0}, {}]) == {"time/step_s": 3.0}
    assert merge([{"rollout/truncated": 0.5, "rollout/responses_count": 0.0}, {"rollout/truncated": 0.0}]) == {
        "rollout/responses_count": 0.0,
        "rollout/truncated": 0.25,
    }
