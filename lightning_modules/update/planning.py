"""Dynamic batching: pieces into micro-batches under a token budget, balanced by cost, as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_modules.layouts.base import Layout, Piece


def plan_micro_batches(
    pieces: Sequence[Piece], layout: Layout, token_budget: int, min_count: int = 0
) -> list[list[Piece]]:
    """Distribute `pieces` over the fewest micro-batches that fit the budget (at least `min_count`, if possible).

    Longest first into the cheapest micro-batch with room, so that costs are even. A piece that exceeds the budget
    alone gets a micro-batch of its own. The dearest micro-batch comes first, dummies last: ranks wait for each other in
    every micro-batch, so their dear ones should meet. Deterministic; the pieces of a micro-batch keep their order.

    Args:
        pieces: work of this rank.
        layout: tells how many tokens pieces take together.
        token_budget: most tokens of a micro-batch.
        min_count: micro-batches that other ranks need; empty ones at the end stand for dummies.
    """
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].cost, i))
    # Pieces over the budget alone stand alone, so they count as one full micro-batch.
    least = -(-sum(min(piece.tokens, token_budget) for piece in pieces) // token_budget)
    count = max(least, min_count)
    while True:
        bins = _fill(pieces, order, layout, token_budget, count)
        if bins is not None:
            break
        count += 1
    filled = sorted((sorted(b) for b in bins if b), key=lambda b: (-sum(pieces[i].cost for i in b), b))
    return [[pieces[i] for i in members] for members in filled] + [[]] * (count - len(filled))


def _fill(
    pieces: Sequence[Piece], order: Sequence[int], layout: Layout, token_budget: int, count: int
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    costs = [0.0] * count
    for i in order:
        for b in sorted(range(count), key=lambda b: (costs[b], b)):
            together = [pieces[j] for j in (*bins[b], i)]
            if not bins[b] or layout.row_tokens(together) <= token_budget:
                bins[b].append(i)
                costs[b] += pieces[i].cost
                break
        else:
            return None
    return bins
