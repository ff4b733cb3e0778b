"""The objects of the optimisation stage: what a micro-batch is and what the policy's one forward returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lightning_modules.core.attention import AttentionPlan


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens that go through the policy in one root forward, whatever the layout.

    Only response tokens are scored. `target_rows`/`target_cols` point at the position whose hidden state *predicts*
    each of the R response tokens, in (group, response, token) order, so that losses never see the layout.
    """

    input_ids: torch.Tensor
    """int64 [B, L]."""
    position_ids: torch.Tensor
    """int64 [4, B, L]: text position, then the three M-RoPE axes (families without M-RoPE repeat the text row)."""
    attention_plan: AttentionPlan | None
    """Who attends to whom within a row; None = every token to those before it, as rows of one sequence do."""
    target_rows: torch.Tensor
    """int64 [R] row of each predicting position."""
    target_cols: torch.Tensor
    """int64 [R] column of each predicting position."""
    target_ids: torch.Tensor
    """int64 [R] response token ids."""
    response_index: torch.Tensor
    """int64 [R]: which response of this micro-batch each token belongs to (0-based, contiguous)."""
    pixel_values: torch.Tensor | None = None
    """Patches of all images, then of all videos: float [P, C]; None for text only (the policy adds the dummy)."""
    image_grid_thw: torch.Tensor | None = None
    """int64 [num_images, 3]."""
    video_grid_thw: torch.Tensor | None = None
    """int64 [num_videos, 3]."""
    response_keys: tuple[tuple[int, int], ...] = ()
    """(group index, response index) in the StepBatch for each response of this micro-batch."""
    uids: tuple[str, ...] = ()
    """Sample ids, for error messages."""


@dataclass(frozen=True)
class TokenOutputs:
    """What the policy says about the R response tokens of a micro-batch."""

    logprobs: torch.Tensor
    """float32 [R]: log-probability of each target under temperature and placeholder ban."""
    entropy: torch.Tensor | None = None
    """float32 [R], or None when not asked for."""
