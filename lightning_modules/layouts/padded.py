"""One row per response, right-padded to the longest: the plain layout, and the reference for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_modules.layouts.base import Context, Layout, Piece, assemble, sequence_rows

if TYPE_CHECKING:
    from lightning_modules.core.types import MicroBatch


class PaddedLayout(Layout):
    """Rows [prompt | response | padding]. No mask is needed: causal attention never reaches padding on the right."""

    name = "padded"

    def row_tokens(self, pieces: Sequence[Piece]) -> int:
        """See `Layout.row_tokens`."""
        return len(pieces) * max((piece.tokens for piece in pieces), default=0)

    def collate(self, pieces: Sequence[Piece], context: Context) -> MicroBatch:
        """See `Layout.collate`."""
        rows, media = sequence_rows(pieces, context)
        return assemble(rows, pieces, media, context)
