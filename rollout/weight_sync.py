"""Hand the policy's weights to the engine and prove that they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rollout.types import Engine

_BYTES_PER_GIB = 1024**3


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved."""

    seconds: float
    num_tensors: int
    num_bytes: int

    def metrics(self) -> dict[str, float]:
        """Scalars for the loggers under `sync/`."""
        return {
            "sync/seconds": self.seconds,
            "sync/tensors": float(self.num_tensors),
            "sync/gib": self.num_bytes / _BYTES_PER_GIB,
        }


class WeightSync:
    """Streams weights into an engine once per version and checks the stream on its way.

    Args:
        engine: receives the weights.
        expected: names that must arrive; None = no check of names.
        check_finite: raise on a weight with NaN or infinity instead of sampling from it (one pass over the weights).
    """

    def __init__(self, engine: Engine, expected: Collection[str] | None = None, check_finite: bool = True) -> None:
        self._engine = engine
        self._expected = None if expected is None else frozenset(expected)
        self._check_finite = check_finite
        self._version: int | None = None

    def is_current(self, version: int) -> bool:
        """Whether the engine already holds the weights of `version`."""
        return version == self._version and not getattr(self._engine, "needs_weights", False)

    def sync(self, version: int, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> SyncReport | None:
        """Bring the engine to `version`; None when it is there already.

        A collective under FSDP2: every rank calls it with the same version.

        Raises:
            RuntimeError: a weight is missing, unknown, repeated or not finite. The engine is unusable then.
        """
        if self.is_current(version):
            return None
        self._version = None
        seen: dict[str, int] = {}
        started = time.monotonic()
        self._engine.update_weights(self._checked(weights(), seen))
        if self._expected is not None and (missing := self._expected - seen.keys()):
            raise RuntimeError(
                f"weights missing in the engine after a sync: {sorted(missing)[:5]} ({len(missing)} of "
                f"{len(self._expected)}); the model family's weight names do not match the checkpoint's"
            )
        self._version = version
        return SyncReport(time.monotonic() - started, len(seen), sum(seen.values()))

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: dict[str, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in weights:
            if name in seen:
                raise RuntimeError(f"weight {name} arrived twice in one sync")
            # A tied output projection may come along although the checkpoint does not list it.
            if self._expected is not None and name not in self._expected and name != "lm_head.weight":
                raise RuntimeError(f"weight {name} is not in the engine's checkpoint; the family's names are wrong")
            if self._check_finite and not bool(value.isfinite().all()):
                raise RuntimeError(f"weight {name} holds NaN or infinity; the update before this sync diverged")
            seen[name] = value.numel() * value.element_size()
            yield name, value
