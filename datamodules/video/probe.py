"""Read what a container says about its video: frame count, rate, size, rotation and the times of its frames.

Complete MP4 files say all of it in their headers (`datamodules/video/headers.py`). Elsewhere counts come from a pass
over the packets, because header counts are missing or wrong in many files, and one frame is decoded for size and
rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import av
import numpy as np

from datamodules.errors import MediaError
from datamodules.video.headers import header_info, video_stream
from datamodules.video.spec import VideoInfo

RELIABLE_TIMES = ("mov", "mp4", "matroska", "webm")
"""Containers whose packets carry presentation times; in others frames are counted in decoding order."""


@dataclass(frozen=True)
class VideoScan:
    """A `VideoInfo` together with the frame times that random access needs."""

    info: VideoInfo
    times: np.ndarray
    """int64 [N]: presentation time of frame i in stream units, ascending; empty when `seekable` is False."""
    keyframes: np.ndarray
    """int64 [K]: indices (into `times`) of the frames at which decoding may start."""
    seekable: bool
    """Whether frame i can be found by its time."""


def probe(path: str | Path) -> VideoInfo:
    """Frame count, rate and size of a video.

    Raises:
        MediaError: the file is missing, not a video, or holds no frame.
    """
    path = Path(path)
    return _info(str(path), *_file_state(path))


def scan(path: str | Path) -> VideoScan:
    """Like `probe`, with the frame times. Results are remembered per file state (size and mtime)."""
    path = Path(path)
    return _scan(str(path), *_file_state(path))


def _file_state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise MediaError(path, f"cannot be read ({error.strerror})", permanent=False) from error
    if state.st_size == 0:
        raise MediaError(path, "is empty")
    return state.st_size, state.st_mtime_ns


@lru_cache(maxsize=262144)
def _info(path: str, size: int, mtime: int) -> VideoInfo:
    return header_info(path) or _scan(path, size, mtime).info


# Few only: the frame times of a long film take megabytes.
@lru_cache(maxsize=16)
def _scan(path: str, _size: int, _mtime: int) -> VideoScan:
    try:
        with av.open(path) as container:
            stream = video_stream(container, path)
            stream.thread_type = "NONE"
            times: list[int | None] = []
            keys: list[int | None] = []
            shape = None
            for packet in container.demux(stream):
                if shape is None:
                    shape = next((_shape(frame) for frame in packet.decode()), None)
                if packet.size == 0 or packet.is_discard:
                    continue
                times.append(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
            names = set(container.format.name.split(","))
            fps = _rate(stream, times)
    except (av.error.FFmpegError, OSError) as error:
        raise MediaError(path, f"cannot be opened as a video ({error})") from error
    if not times:
        raise MediaError(path, "holds no video frame")
    if shape is None:
        raise MediaError(path, "no frame can be decoded")
    known = None not in times and None not in keys
    seekable = bool(names & set(RELIABLE_TIMES)) and known and len(set(times)) == len(times) and bool(keys)
    ordered = np.sort(np.asarray(times if seekable else [], dtype=np.int64))
    starts = np.searchsorted(ordered, np.sort(np.asarray(keys if seekable else [], dtype=np.int64)))
    info = VideoInfo(num_frames=len(times), fps=fps, width=shape[0], height=shape[1], rotation=shape[2])
    return VideoScan(info=info, times=ordered, keyframes=starts, seekable=seekable)


def _shape(frame: av.VideoFrame) -> tuple[int, int, int]:
    """(width, height, rotation) of a decoded frame, width and height after rotation."""
    rotation = round(frame.rotation / 90) * 90 % 360
    if rotation in (90, 270):
        return frame.height, frame.width, rotation
    return frame.width, frame.height, rotation


def _rate(stream: av.VideoStream, times: list[int | None]) -> float:
    """Average frames per second: the header's, else what the frame times say, else the container's guess."""
    if stream.average_rate:
        return float(stream.average_rate)
    known = sorted(time for time in times if time is not None)
    if len(known) > 1 and stream.time_base and known[-1] > known[0]:
        return (len(known) - 1) / float((known[-1] - known[0]) * stream.time_base)
    return float(stream.guessed_rate or stream.base_rate or 24.0)
