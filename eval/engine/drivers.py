"""The drivers that `conf/driver/*.yaml` build."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from eval.engine.async_driver import AsyncDriver, Replica
from eval.engine.generate import LockStepDriver

if TYPE_CHECKING:
    from rollout.types import Engine


def make_async(
    engine: Callable[[], Replica],
    replicas: int = 1,
    max_in_flight: int = 64,
    deadline_s: float = 1800.0,
    restarts: int = 2,
) -> AsyncDriver:
    """Engines of this machine behind one queue; see `AsyncDriver`.

    Raises:
        ValueError: several engines would share one GPU.
    """
    if replicas > 1:
        import torch

        if torch.cuda.is_available():
            raise ValueError(f"driver.replicas={replicas}: all would use the same GPU; driver=ray gives each its own")
    return AsyncDriver([engine] * replicas, max_in_flight, deadline_s, restarts)


def make_ray(
    engine: Callable[[], Replica],
    replicas: int = 1,
    max_in_flight: int = 64,
    deadline_s: float = 1800.0,
    restarts: int = 2,
    gpus_per_replica: float = 1,
    address: str | None = None,
) -> AsyncDriver:
    """Engines in Ray actors behind one queue.

    Args:
        engine: builds the engine inside the actor.
        replicas: actors.
        max_in_flight: requests in flight per actor.
        deadline_s: seconds for one request.
        restarts: how often a dead actor is replaced.
        gpus_per_replica: Ray GPUs per actor.
        address: Ray cluster; None = RAY_ADDRESS, or one on this machine.
    """
    from eval.engine.ray_replica import RayReplica, connect

    connect(address)

    def build() -> Replica:
        return RayReplica(engine, gpus_per_replica)

    return AsyncDriver([build] * replicas, max_in_flight, deadline_s, restarts)


def make_lock_step(
    engine: Callable[[], Engine], batch_size: int = 32, deadline_s: float | None = 3600.0
) -> LockStepDriver:
    """The in-process engine of training runs, batch after batch; see `LockStepDriver`."""
    built = engine()
    return LockStepDriver(built.generate, batch_size, built.close, deadline_s)
