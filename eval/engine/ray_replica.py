"""A replica in a Ray actor: one engine per GPU group, on any node of the cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from eval.engine.async_driver import Replica
from eval.engine.errors import EngineLostError
from rollout.types import GenerateRequest, Response

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]


class RayReplica:
    """A `Replica` whose engine lives in an actor.

    Args:
        build: builds the engine's replica inside the actor; must pickle.
        num_gpus: Ray GPUs of the actor.
    """

    def __init__(self, build: Callable[[], Replica], num_gpus: float = 1) -> None:
        self._build, self._num_gpus = build, num_gpus
        self._actor: Any = None

    async def start(self) -> None:
        """Place the actor and load the model in it."""
        options = {"num_cpus": 1, "num_gpus": self._num_gpus, "max_concurrency": 1024, "max_restarts": 0}
        self._actor = ray.remote(_Host).options(**options).remote(self._build)
        await self._actor.start.remote()

    async def generate(self, request: GenerateRequest) -> Response:
        """Answer one request.

        Raises:
            EngineLostError: the actor or its node is gone.
        """
        reference = self._actor.generate.remote(request)
        try:
            return await reference
        except RayActorError as error:
            raise EngineLostError(f"a Ray actor died ({error.__class__.__name__})") from error
        except RayTaskError as error:
            if isinstance(error.cause, EngineLostError):
                raise error.cause from error
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def close(self) -> None:
        """End the actor."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None


class _Host:
    """The inside of the actor."""

    def __init__(self, build: Callable[[], Replica]) -> None:
        self._replica = build()

    async def start(self) -> None:
        await self._replica.start()

    async def generate(self, request: GenerateRequest) -> Response:
        return await self._replica.generate(request)

    async def process_id(self) -> int:
        """Of the actor's process."""
        return os.getpid()


def connect(address: str | None = None) -> None:
    """Join a Ray cluster, or start one on this machine; nothing to do when there is one already."""
    if not ray.is_initialized():
        environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, include_dashboard=False)
