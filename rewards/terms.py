"""Extra terms of the total: penalties that look at the whole response, not at its answer."""

from __future__ import annotations

import re
from typing import Protocol

from rewards.base import Query


class Term(Protocol):
    """One extra term: a number that is added to the total under its configured name."""

    def __call__(self, query: Query) -> float:
        """Value to add, usually in [-1, 0]."""
        ...


def num_tokens(query: Query) -> int:
    """Length of the response in tokens (`num_tokens` of the record), else its number of words."""
    known = query.fields.get("num_tokens")
    return int(known) if known is not None else len(query.response.split())


def soft_overlong(tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's punishment of a long response (arXiv 2503.14476, equation 13).

    0 up to `max_tokens - buffer`, then linear down to -1 at `max_tokens`, and -1 beyond.
    """
    return -min(1.0, max(0.0, (tokens - (max_tokens - buffer)) / buffer))


class SoftOverlong:
    """DAPO's soft overlong punishment, see `soft_overlong`, scaled by `weight`.

    Args:
        max_tokens: longest response in tokens.
        buffer: tokens before the limit over which the penalty grows.
        weight: factor of the penalty.
    """

    def __init__(self, max_tokens: int, buffer: int, weight: float = 1.0) -> None:
        if not 0 < buffer <= max_tokens:
            raise ValueError(f"buffer={buffer} must lie in 1..max_tokens={max_tokens}")
        self.max_tokens, self.buffer, self.weight = max_tokens, buffer, weight

    def __call__(self, query: Query) -> float:
        """Penalty in [-weight, 0]."""
        return self.weight * soft_overlong(num_tokens(query), self.max_tokens, self.buffer)


class LengthBand:
    """`weight` when the response has between `low` and `high` tokens, else 0: rewards thinking of a wanted length."""

    def __init__(self, low: int, high: int, weight: float = 0.1) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"low={low} and high={high} must satisfy 0 <= low <= high")
        self.low, self.high, self.weight = low, high, weight

    def __call__(self, query: Query) -> float:
        """0 or `weight`."""
        return self.weight if self.low <= num_tokens(query) <= self.high else 0.0


class Repetition:
    """Share of repeated n-grams, as a penalty (arXiv 2502.03373): 0 for none, -weight when every one repeats.

    Args:
        ngram: words per n-gram.
        weight: factor of the penalty.
    """

    def __init__(self, ngram: int = 4, weight: float = 0.5) -> None:
        if ngram < 1:
            raise ValueError(f"ngram={ngram}: at least one word")
        self.ngram, self.weight = ngram, weight

    def __call__(self, query: Query) -> float:
        """Penalty in [-weight, 0]; 0 for responses shorter than one n-gram."""
        words = re.findall(r"\w+", query.response[:100_000].lower())
        total = len(words) - self.ngram + 1
        if total < 2:
            return 0.0
        unique = len({tuple(words[i : i + self.ngram]) for i in range(total)})
        return -self.weight * (1 - unique / total)
