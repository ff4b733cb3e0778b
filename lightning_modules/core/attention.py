"""Exact attention for packed rows and shared-prefix groups, registered as a transformers attention function.

A layout describes a row by an `AttentionPlan`; the plan travels to every attention layer as a keyword argument. On
CPU each segment runs its own scaled-dot-product kernel (no dense [L, L] mask over unrelated sequences); on CUDA one
flex-attention block mask skips the empty blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ATTENTION_NAME = "segmented_sdpa"


@dataclass(frozen=True)
class Segment:
    """One prompt and the responses that share it, side by side in a row.

    Example: `Segment(start=0, prompt=5, responses=(2, 3))` covers ten columns: five of the prompt, two of response 0,
    three of response 1. A plain packed sequence is a segment whose `prompt` is its whole length.
    """

    start: int
    """First column."""
    prompt: int
    """Tokens every response may look at; causal among themselves."""
    responses: tuple[int, ...] = ()
    """Tokens of each response; a response sees the prompt and itself, causally."""

    @property
    def end(self) -> int:
        """Column after the last one."""
        return self.start + self.prompt + sum(self.responses)


class AttentionPlan:
    """Who may attend to whom in one row [1, L]; masks are built once and reused by every layer."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        column = 0
        for segment in segments:
            if segment.start != column or segment.prompt < 1:
                raise ValueError(f"segments must be adjacent and hold a prompt; got {segment} at column {column}")
            column = segment.end
        self.segments = segments
        self.length = column
        self._branch_masks: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._block_masks: dict[torch.device, BlockMask] = {}

    def branch_mask(self, index: int, device: torch.device) -> torch.Tensor:
        """Bool [responses, prompt + responses]: what the response tokens of segment `index` may see."""
        key = (index, device)
        if key not in self._branch_masks:
            segment = self.segments[index]
            branch = torch.repeat_interleave(torch.tensor(segment.responses, device=device))
            same = branch[:, None] == branch[None, :]
            own = torch.ones_like(same).tril() & same
            prompt = torch.ones(len(branch), segment.prompt, dtype=torch.bool, device=device)
            self._branch_masks[key] = torch.cat([prompt, own], dim=1)
        return self._branch_masks[key]

    def labels(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Two int64 [L]: the segment of each column, and its response (0 = prompt, i + 1 = response i)."""
        sizes = torch.tensor([s.end - s.start for s in self.segments], device=device)
        branches = torch.tensor([n for s in self.segments for n in (s.prompt, *s.responses)], device=device)
        names = torch.tensor([i for s in self.segments for i in range(1 + len(s.responses))], device=device)
        return torch.repeat_interleave(sizes), torch.repeat_interleave(names, branches)

    def block_mask(self, device: torch.device) -> BlockMask:
        """The mask of the whole row for flex attention."""
        if device not in self._block_masks:
            from torch.nn.attention.flex_attention import create_block_mask

            segment, branch = self.labels(device)

            def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
                same = (segment[query] == segment[key]) & (query >= key)
                return same & ((branch[key] == 0) | (branch[key] == branch[query]))

            self._block_masks[device] = create_block_mask(visible, None, None, self.length, self.length, device=device)
        return self._block_masks[device]


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' signature: query [B, H, L, D], key and value [B, H_kv, L, D] -> [B, L, H, D].

    Without a plan it is ordinary causal (or, for `is_causal=False`, full) attention. Right-padded rows need no mask:
    a causal query never reaches the padding behind it.
    """
    if attention_plan is not None and query.device.type == "cuda":
        return _flex()(
            query,
            key,
            value,
            block_mask=attention_plan.block_mask(query.device),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2), None
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
    if attention_plan is not None:
        return _by_segments(query, key, value, scaling, attention_plan).transpose(1, 2), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=causal
    )
    return out.transpose(1, 2).contiguous(), None


def _by_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, plan: AttentionPlan
) -> torch.Tensor:
    # split, not slices: the backward of a slice fills a tensor of the whole row, once per segment.
    lengths = [segment.end - segment.start for segment in plan.segments]
    segments = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    outputs = []
    for index, (q, k, v) in enumerate(segments):
        prompt = plan.segments[index].prompt
        own = [t[:, :, :prompt] for t in (q, k, v)]
        outputs.append(F.scaled_dot_product_attention(own[0], own[1], own[2], scale=scaling, is_causal=True))
        if plan.segments[index].responses:
            mask = plan.branch_mask(index, query.device)
            outputs.append(F.scaled_dot_product_attention(q[:, :, prompt:], k, v, attn_mask=mask, scale=scaling))
    return torch.cat(outputs, dim=2)


@functools.cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Row lengths differ in every micro-batch: static shapes would recompile until torch gives up and goes dense.
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def register() -> str:
    """Make the function known to transformers (once) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, segmented_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    return ATTENTION_NAME


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are the plan's business; transformers must not build an [L, L] one."""
    return None
