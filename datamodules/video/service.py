"""Decode in a separate process that can be killed: broken files make decoders hang, leak or crash."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from datamodules.common.worker_handle import Reply, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from datamodules.common.workers import WorkerPool
from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.spec import VideoPlan, VideoSpec

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")
T = TypeVar("T")
ATTEMPTS = 2
"""A clip whose decoder crashes gets one more."""
PROCESSES = 16
"""Most decoders at one time; they start as threads ask for clips at the same time."""


@dataclass(frozen=True)
class Clip:
    """What is to be decoded."""

    path: Path
    ref: MediaRef
    spec: VideoSpec


@dataclass(frozen=True)
class Decoded:
    """Frames uint8 [T, 3, H, W] and where they lie in time."""

    frames: np.ndarray
    plan: VideoPlan


@dataclass(frozen=True)
class Refused:
    """Why a clip cannot be used; the fields of `MediaError`."""

    reason: str
    permanent: bool


class DecodeService:
    """Callable like `decode_spec`, with a deadline; its processes start with the first clips.

    Args:
        timeout_s: seconds for one clip; afterwards its process is killed and the clip reported.
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        if timeout_s <= 0:
            raise ValueError(f"decode timeout of {timeout_s} s must be positive")
        self.timeout_s = timeout_s
        self.pool = WorkerPool(build_decoder, PROCESSES, attempts=ATTEMPTS)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.timeout_s,)  # another process has processes of its own

    def __call__(self, path: Path, ref: MediaRef, spec: VideoSpec) -> tuple[np.ndarray, VideoPlan]:
        """Decode one clip.

        Raises:
            MediaError: the clip cannot be decoded, took too long, or crashed the decoder (twice).
        """
        from datamodules.common.frames import share

        decoded = outcome(self.pool.submit(Clip(path, ref, spec), self.timeout_s), path)
        return share(decoded.frames), decoded.plan

    def close(self) -> None:
        """End the processes; further clips are refused."""
        self.pool.close()


def outcome(future: Future[Reply], path: object) -> Any:
    """The value that a decoding process gave.

    Raises:
        MediaError: there is none.
    """
    try:
        value = future.result().value
    except WorkerTimeout as error:
        raise MediaError(path, f"decoding {error}") from None
    except WorkerDied as error:
        raise MediaError(path, f"the decoder process died ({error})") from None
    except WorkerRaised as error:
        raise MediaError(path, f"{error.kind}: {error}", permanent=False) from None
    except WorkerError as error:
        raise MediaError(path, f"no decoder process: {error}", permanent=False) from None
    if isinstance(value, Refused):
        raise MediaError(path, value.reason, permanent=value.permanent)
    return value


def refusing(work: Callable[P, T]) -> Callable[P, T | Refused]:
    """`work` with its `MediaError` as a value, which keeps whether it is permanent on its way to another process."""

    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | Refused:
        try:
            return work(*args, **kwargs)
        except MediaError as error:
            return Refused(error.reason, error.permanent)

    return guarded


def build_decoder() -> Callable[[Clip], Decoded | Refused]:
    """In a process: import what decoding needs before the first deadline starts."""
    import torch  # noqa: F401

    from datamodules.video.decode import decode_spec

    return refusing(lambda clip: Decoded(*decode_spec(clip.path, clip.spec, clip.ref.start, clip.ref.end)))
