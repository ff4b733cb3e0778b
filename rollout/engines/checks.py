"""What every engine asserts about its input and output: a violation is an error with the sample's id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.types import SampleError

if TYPE_CHECKING:
    from datamodules.types import PreparedSample
    from rollout.types import GenerateRequest


def check_requests(requests: Sequence[GenerateRequest], max_model_len: int | None = None) -> None:
    """Check before anything is generated.

    Args:
        requests: what is about to be generated.
        max_model_len: the engine's longest sequence in tokens, or None.

    Raises:
        ValueError: request ids repeat.
        SampleError: a prompt does not fit with its response.
    """
    ids = [request.request_id for request in requests]
    if len(set(ids)) != len(ids):
        repeated = sorted({i for i in ids if ids.count(i) > 1})
        raise ValueError(f"request ids are not unique: {repeated[:5]}")
    for request in requests:
        total = request.prompt.num_prompt_tokens + request.sampling.max_tokens
        if max_model_len is not None and total > max_model_len:
            raise SampleError(
                request.prompt.uid,
                f"prompt of {request.prompt.num_prompt_tokens} tokens + max_tokens={request.sampling.max_tokens} "
                f"exceeds max_model_len={max_model_len}; raise rollout.engine.max_model_len or lower "
                "data.max_prompt_tokens (prompts with media are never truncated)",
            )


def check_prompt_ids(prompt: PreparedSample, engine_ids: Sequence[int]) -> None:
    """Raise when the engine expanded a prompt to other token ids than the processor did.

    Args:
        prompt: the sample with the ids the trainer will read.
        engine_ids: the ids the engine computed its keys and values for.
    """
    expected = prompt.expanded_ids
    if tuple(engine_ids) == expected:
        return
    pairs = enumerate(zip(expected, engine_ids, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(engine_ids)))
    raise RuntimeError(
        f"sample {prompt.uid}: the engine's prompt differs from the processor's at token {first}: engine "
        f"{list(engine_ids[first : first + 4])} ({len(engine_ids)} tokens), processor "
        f"{list(expected[first : first + 4])} ({len(expected)} tokens). Training on it would score other positions "
        "than were sampled; check that engine and trainer use the same model folder and transformers version"
    )


def check_response_ids(request: GenerateRequest, token_ids: Sequence[int]) -> None:
    """Raise when a response is empty, too long, or holds a banned token."""
    if not 0 < len(token_ids) <= request.sampling.max_tokens:
        raise RuntimeError(
            f"sample {request.prompt.uid}: the engine returned {len(token_ids)} tokens for request "
            f"{request.request_id}, allowed are 1 to {request.sampling.max_tokens}"
        )
    banned = set(request.sampling.banned_ids)
    for place, token in enumerate(token_ids):
        if token in banned:
            raise RuntimeError(
                f"sample {request.prompt.uid}: response {request.request_id} holds the banned token {token} at "
                f"position {place}; the ban did not reach the engine's sampler"
            )
