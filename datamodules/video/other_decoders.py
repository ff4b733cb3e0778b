"""Optional decoders: torchcodec (fast, needs FFmpeg on the system) and decord (checked before it is used)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from datamodules.errors import MediaError

if TYPE_CHECKING:
    from datamodules.video.probe import VideoScan

BATCH = 8
"""Frames fetched in one call."""

_decord_checked: dict[tuple[str, int, int], str | None] = {}
"""(path, size, mtime) -> why decord must not read the file, or None when its random access is right."""


@lru_cache(maxsize=1)
def check_torchcodec() -> None:
    """Raise RuntimeError, saying what to install, when torchcodec or FFmpeg's libraries cannot be loaded."""
    try:
        from torchcodec.decoders import VideoDecoder

        # The libraries are loaded by the first decoder; this one fails anyway, for it has no data.
        VideoDecoder(b"none")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, (ImportError, OSError)) or "load libtorchcodec" in str(error):
            raise RuntimeError(
                "decoder=torchcodec cannot be loaded: it needs FFmpeg's shared libraries on the system "
                f"(apt-get install ffmpeg), or use decoder=pyav ({str(error).splitlines()[0]})"
            ) from error


def check_decord() -> None:
    """Raise RuntimeError when decord is not installed."""
    if importlib.util.find_spec("decord") is None:
        raise RuntimeError("decoder=decord: decord is not installed (pip install decord), or use decoder=pyav")


def read_torchcodec(path: str, video: VideoScan, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    """torchcodec's exact mode.

    Raises:
        RuntimeError: torchcodec cannot be loaded (usually no FFmpeg on the system).
        MediaError: the file is damaged, or torchcodec counts other frames than the container.
    """
    check_torchcodec()
    from torchcodec.decoders import VideoDecoder

    try:
        decoder = VideoDecoder(path, dimension_order="NHWC", seek_mode="exact")
        if decoder.metadata.num_frames != video.info.num_frames:
            raise MediaError(
                path, f"torchcodec counts {decoder.metadata.num_frames} frames, the container {video.info.num_frames}"
            )
        for i in range(0, len(wanted), BATCH):
            yield from decoder.get_frames_at(indices=list(wanted[i : i + BATCH])).data.numpy()
    except (RuntimeError, IndexError) as error:
        raise MediaError(path, f"damaged or not decodable ({str(error).splitlines()[0]})") from error


def read_decord(path: str, video: VideoScan, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    """decord, after its random access was compared with its sequential decoding of this file, once.

    Raises:
        RuntimeError: decord is not installed.
        MediaError: decord cannot open the file, or its random access returns other frames.
    """
    check_decord()
    import decord

    if video.info.rotation:
        raise MediaError(path, "decord ignores the rotation flag of this file; use decoder=pyav")
    state = os.stat(path)
    key = (path, state.st_size, state.st_mtime_ns)
    try:
        if key not in _decord_checked:
            _decord_checked[key] = _check_random_access(path, video)
        if (problem := _decord_checked[key]) is not None:
            raise MediaError(path, problem)
        reader = decord.VideoReader(path)
        for i in range(0, len(wanted), BATCH):
            yield from reader.get_batch(list(wanted[i : i + BATCH])).asnumpy()
    except decord.DECORDError as error:
        raise MediaError(path, f"decord cannot read it ({str(error).strip().splitlines()[0]})") from error


def _check_random_access(path: str, video: VideoScan, num_checks: int = 16) -> str | None:
    """Compare frames fetched by index with the same frames of a sequential pass."""
    import decord

    reader = decord.VideoReader(path)
    total = len(reader)
    if total != video.info.num_frames:
        return f"decord counts {total} frames, the container {video.info.num_frames}; use decoder=pyav"
    checks = sorted({round(i * (total - 1) / max(num_checks - 1, 1)) for i in range(num_checks)})
    fetched = dict(zip(checks, reader.get_batch(checks).asnumpy(), strict=True))
    sequential = decord.VideoReader(path)
    for index in range(checks[-1] + 1):
        frame = sequential.next()
        if index in fetched and not np.array_equal(frame.asnumpy(), fetched[index]):
            return f"decord's random access returns a wrong frame at index {index}; use decoder=pyav"
    return None
