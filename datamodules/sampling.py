"""In which order samples are used: pure functions of (seed, position), so that resuming needs no stored state.

An order is an endless sequence of sample indices, made of epochs. Step k uses the positions [k*B, (k+1)*B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class EpochOrder(Protocol):
    """An endless order over samples, epoch by epoch."""

    epoch_length: int
    """Positions per epoch."""

    def epoch(self, number: int) -> np.ndarray:
        """int64 [epoch_length] sample indices of one epoch."""
        ...


def positions(order: EpochOrder, start: int, stop: int) -> list[int]:
    """Sample indices at the positions [start, stop) of the endless order."""
    if start < 0 or stop < start:
        raise ValueError(f"positions [{start}, {stop}) are not a range")
    out: list[int] = []
    length = order.epoch_length
    while start < stop:
        number, offset = divmod(start, length)
        taken = order.epoch(number)[offset : offset + stop - start]
        out += taken.tolist()
        start += len(taken)
    return out


def hash_keys(seed: int, stream: int, count: int) -> np.ndarray:
    """uint64 [count] well-mixed numbers that depend on nothing but the arguments (splitmix64).

    Library random generators may change their streams between versions; a resumed run must not.
    """
    with np.errstate(over="ignore"):
        base = _mix(np.uint64(seed % 2**63) + np.uint64(0x9E3779B97F4A7C15))
        base = _mix(base ^ (np.uint64(stream) * np.uint64(0xD1B54A32D192ED03)))
        return _mix(base + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: Any) -> Any:
    """One round of splitmix64 on a uint64, or on every element of an array of them."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(seed: int, stream: int, count: int) -> np.ndarray:
    """int64 [count] permutation of range(count)."""
    return np.argsort(hash_keys(seed, stream, count), kind="stable").astype(np.int64)


class SequentialOrder:
    """File order, epoch after epoch."""

    def __init__(self, count: int) -> None:
        _check_count(count)
        self.epoch_length = count

    def epoch(self, number: int) -> np.ndarray:
        """int64 [count]."""
        return np.arange(self.epoch_length, dtype=np.int64)


class ShuffledOrder:
    """A new permutation of all samples in every epoch."""

    def __init__(self, count: int, seed: int = 0) -> None:
        _check_count(count)
        self.epoch_length = count
        self.seed = seed

    def epoch(self, number: int) -> np.ndarray:
        """int64 [count]."""
        return permutation(self.seed, number, self.epoch_length)


class MixtureOrder:
    """Several sources in given proportions; each source runs through its own permutations without gaps.

    Example: sizes (900, 100) with weights (1, 1): an epoch has 1000 positions, 500 from each source; the first source
    needs 1.8 epochs for one pass, the second is seen five times per epoch.

    Args:
        sizes: samples per source; indices are counted through the sources in order.
        weights: relative share of each source in every epoch; not negative.
        seed: seed of the shuffles.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int = 0) -> None:
        if len(sizes) != len(weights):
            raise ValueError(f"{len(weights)} mixture weights for {len(sizes)} sources")
        if any(w < 0 for w in weights) or sum(weights) <= 0:
            raise ValueError(f"mixture weights {list(weights)} must not be negative and must sum to more than 0")
        empty = [i for i, (n, w) in enumerate(zip(sizes, weights, strict=True)) if w > 0 and n == 0]
        if empty:
            raise ValueError(f"sources {empty} have a positive weight but no samples")
        self.epoch_length = int(sum(sizes))
        _check_count(self.epoch_length)
        self.seed = seed
        self.sizes = tuple(int(n) for n in sizes)
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * self.epoch_length
        counts = np.floor(shares).astype(np.int64)
        # Largest remainders get the positions that rounding down left over.
        for i in np.argsort(-(shares - counts), kind="stable")[: self.epoch_length - counts.sum()]:
            counts[i] += 1
        self.counts = tuple(int(c) for c in counts)

    def epoch(self, number: int) -> np.ndarray:
        """int64 [epoch_length]."""
        parts, offset = [], 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            if count:
                own = ShuffledOrder(size, self.seed + 7919 * (source + 1))
                parts.append(np.asarray(positions(own, number * count, (number + 1) * count)) + offset)
            offset += size
        joined = np.concatenate(parts).astype(np.int64)
        return joined[permutation(self.seed, number, len(joined))]


def _check_count(count: int) -> None:
    if count < 1:
        raise ValueError("there are no samples to draw from")
