"""A prompt once, then all its responses: the vision tower and the prompt's tokens are computed once per group.

Exact, not approximate: a response attends to the prompt and to itself, with the positions it would have alone.
(Prefix Grouper, arXiv 2506.05433, describes the idea for text.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_modules.core.attention import AttentionPlan, Segment
from lightning_modules.layouts.base import (
    Context,
    Layout,
    Piece,
    Row,
    Selection,
    assemble,
    prompt_part,
    response_ids,
)
from lightning_modules.layouts.packed import concatenate

if TYPE_CHECKING:
    from lightning_modules.core.types import MicroBatch
    from rollout.types import RolloutGroup

log = logging.getLogger(__name__)


class SharedPrefixLayout(Layout):
    """One row [prompt a | a1 | a2 | ... | prompt b | b1 | ...]; several groups share a row.

    A group over the token budget is split by responses, each part with the prompt.
    """

    name = "shared_prefix"
    keeps_groups = True

    def __init__(self) -> None:
        self._warned = False

    def pieces(self, groups: Sequence[RolloutGroup], selection: Selection, token_budget: int) -> list[Piece]:
        """See `Layout.pieces`."""
        result: list[Piece] = []
        for index, responses in selection:
            group = groups[index]
            before = len(result)
            part: list[int] = []
            used = len(group.prompt.expanded_ids)
            for r in responses:
                length = len(group.responses[r].token_ids)
                if part and used + length > token_budget:
                    result.append(Piece(index, group, tuple(part)))
                    part, used = [], len(group.prompt.expanded_ids)
                part.append(r)
                used += length
            if part:
                result.append(Piece(index, group, tuple(part)))
            self._warn_once(group, len(result) - before, token_budget)
        return result

    def _warn_once(self, group: RolloutGroup, parts: int, token_budget: int) -> None:
        if parts > 1 and not self._warned:
            self._warned = True
            log.warning(
                "sample %s: its group needs more than micro_batch_tokens=%d and runs in %d parts, each with the whole "
                "prompt of %d tokens; a larger budget would compute the prompt once",
                group.uid,
                token_budget,
                parts,
                len(group.prompt.expanded_ids),
            )

    def collate(self, pieces: Sequence[Piece], context: Context) -> MicroBatch:
        """See `Layout.collate`."""
        rows, media, segments = [], [], []
        start = 0
        for piece in pieces:
            row, segment = self._row(piece, start, context)
            rows.append(row)
            segments.append(segment)
            media.append(context.patchify(piece.group.prompt))
            start = segment.end
        return assemble([concatenate(rows)], pieces, media, context, AttentionPlan(tuple(segments)))

    @staticmethod
    def _row(piece: Piece, start: int, context: Context) -> tuple[Row, Segment]:
        prompt = prompt_part(piece, context.family)
        responses = response_ids(piece, context.family)
        last = len(prompt.ids) - 1
        column = len(prompt.ids)
        targets = []
        for ids in responses:
            # The prompt's last token predicts every first token; the rest are predicted by their predecessors.
            targets.append(torch.tensor([last, *range(column, column + len(ids) - 1)]))
            column += len(ids)
        row = Row(
            ids=torch.cat([prompt.ids, *responses]),
            positions=torch.cat([prompt.positions, *(prompt.continuation(len(ids)) for ids in responses)], dim=1),
            targets=torch.cat(targets),
        )
        return row, Segment(start, len(prompt.ids), tuple(len(ids) for ids in responses))
