"""How a sample and a response to it become a query: the one place that training and evaluation share."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rewards.base import Score

if TYPE_CHECKING:
    from datamodules.types import Sample
    from rewards.router import RewardRouter
    from rollout.types import Response

RESERVED = frozenset({"self", "response", "ground_truth", "problem_type", "options", "mode", "benchmark"})
"""Arguments of `RewardRouter.submit` that further fields of a record must not overwrite."""


def submit_response(router: RewardRouter, sample: Sample, response: Response) -> Future[Score]:
    """Score a response with everything that the record says; raises ValueError for an unknown `problem_type` only."""
    fields: dict[str, Any] = {str(k): v for k, v in sample.extra.items() if str(k) not in RESERVED}
    fields |= {
        "question": sample.problem,
        "uid": sample.uid,
        "num_tokens": len(response.token_ids),
        "finish_reason": response.finish_reason,
    }
    return router.submit(
        response=response.text,
        ground_truth=sample.answer,
        problem_type=sample.problem_type,
        options=sample.options,
        **fields,
    )
