"""Where text continues after a medium under M-RoPE."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def chain_positions(positions: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Let every run of text or of one medium begin one after the largest position so far, over all three axes.

    That is the rule the Qwen models were trained with (Qwen2-VL, arXiv 2409.12191, section 2.1) and that vLLM applies.
    transformers 5.19 continues after max(height, width) instead: for a Qwen2-VL or Qwen2.5-VL video with more
    temporal than spatial steps the text behind it would reuse positions of the video. Where a video is written as
    single frames (Qwen3-VL) both rules agree and nothing changes.

    Example: a video of 4 x 2 x 3 merged patches that begins at 6 occupies 6..9, 6..7 and 6..8; text goes on at 10.

    Args:
        positions: int64 [3, L], right within each run, as transformers' `get_rope_index` gives them.
        kinds: int64 [L], 0 = text, other values = media; one medium is one run of equal values.

    Returns:
        int64 [3, L].
    """
    result = positions.clone()
    start = following = 0
    for _, run in groupby(kinds.tolist()):
        stop = start + len(list(run))
        part = positions[:, start:stop]
        result[:, start:stop] = part - part.min() + following
        following = int(result[:, start:stop].max()) + 1
        start = stop
    return result
