"""All responses in one row without padding; every sequence attends to itself only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_modules.core.attention import AttentionPlan, Segment
from lightning_modules.layouts.base import Context, Layout, Piece, Row, assemble, sequence_rows

if TYPE_CHECKING:
    from lightning_modules.core.types import MicroBatch


class PackedLayout(Layout):
    """One row [prompt a | response a1 | prompt a | response a2 | ...]."""

    name = "packed"

    def collate(self, pieces: Sequence[Piece], context: Context) -> MicroBatch:
        """See `Layout.collate`."""
        rows, media = sequence_rows(pieces, context)
        segments = []
        start = 0
        for row in rows:
            segments.append(Segment(start, len(row.ids)))
            start += len(row.ids)
        return assemble([concatenate(rows)], pieces, media, context, AttentionPlan(tuple(segments)))


def concatenate(rows: Sequence[Row]) -> Row:
    """Join rows end to end, moving their targets."""
    offsets = torch.tensor([0] + [len(row.ids) for row in rows]).cumsum(0).tolist()
    return Row(
        ids=torch.cat([row.ids for row in rows]),
        positions=torch.cat([row.positions for row in rows], dim=1),
        targets=torch.cat([row.targets + offset for row, offset in zip(rows, offsets, strict=False)]),
    )
