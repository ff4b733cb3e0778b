"""Decode the frames of a plan and resize them: one function, several decoders, the same pixels.

Frames are converted and resized in small chunks, so that memory is bounded by the result, not by the source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from datamodules.errors import MediaError
from datamodules.video import other_decoders
from datamodules.video.headers import video_stream
from datamodules.video.probe import VideoScan, scan

if TYPE_CHECKING:
    from datamodules.video.spec import VideoPlan, VideoSpec

logger = logging.getLogger(__name__)

CHUNK = 8
"""Frames resized in one call."""
SEEK_GAP = 8
"""Frames that are decoded rather than jumped over: a seek throws the decoder's state away."""

FrameReader = Callable[["str", "VideoScan", "Sequence[int]"], "Iterator[np.ndarray]"]
"""(path, scan, ascending unique indices) -> uint8 [H, W, 3] RGB frames in that order, rotated for display."""


def decode(path: str | Path, plan: VideoPlan, decoder: str = "pyav", conceal_damage: bool = False) -> np.ndarray:
    """Decode and resize the frames of `plan`.

    Args:
        path: the video.
        plan: which frames, at what size.
        decoder: `pyav`, `torchcodec` or `decord`.
        conceal_damage: take what the decoder guesses for damaged parts of the stream instead of refusing the video
            (pyav only; the other decoders always guess).

    Returns:
        uint8 [T, 3, H, W], RGB, C-contiguous.

    Raises:
        MediaError: a wanted frame is missing or damaged. Another frame is never returned in its place.
    """
    reader = get_reader(decoder, conceal_damage)
    wanted = sorted(set(plan.indices))
    place = {index: i for i, index in enumerate(wanted)}
    frames = np.empty((len(wanted), 3, plan.height, plan.width), dtype=np.uint8)
    done = 0
    for chunk in _chunks(reader(str(path), scan(path), wanted)):
        frames[done : done + len(chunk)] = resize(chunk, plan.height, plan.width)
        done += len(chunk)
    if done != len(wanted):
        raise MediaError(path, f"decoder {decoder} delivered {done} of {len(wanted)} frames")
    if len(wanted) == len(plan.indices):
        return frames
    return frames[[place[index] for index in plan.indices]]


def decode_spec(
    path: str | Path, spec: VideoSpec, start: float | None = None, end: float | None = None
) -> tuple[np.ndarray, VideoPlan]:
    """Probe, plan and decode in one go."""
    plan = spec.plan(scan(path).info, start, end, path)
    return decode(path, plan, spec.decoder, spec.conceal_damage), plan


def resize(frames: list[np.ndarray], height: int, width: int) -> np.ndarray:
    """Bicubic, antialiased resize of uint8 [H0, W0, 3] frames, rounded to uint8 [T, 3, H, W]."""
    import torch

    batch = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    if batch.shape[-2:] == (height, width):
        return batch.numpy()
    # What torchvision's resize does with uint8, without importing torchvision into every decoder process.
    resized = torch.nn.functional.interpolate(
        batch.float(), size=(height, width), mode="bicubic", align_corners=False, antialias=True
    )
    return resized.clamp_(0, 255).round_().to(torch.uint8).numpy()


def get_reader(decoder: str, conceal_damage: bool = False) -> FrameReader:
    """The frame reader of a decoder's name.

    Raises:
        ValueError: the name is unknown.
    """
    if decoder == "pyav":
        return partial(read_pyav, conceal_damage=conceal_damage)
    if decoder in ("torchcodec", "decord"):
        return getattr(other_decoders, f"read_{decoder}")
    raise ValueError(f"decoder {decoder!r} is unknown; use pyav, torchcodec or decord")


def check_decoder(decoder: str) -> None:
    """Say before any work starts that a decoder cannot be used on this machine.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: it cannot be loaded; the message says what to install.
    """
    get_reader(decoder)
    if decoder != "pyav":
        getattr(other_decoders, f"check_{decoder}")()


def read_pyav(path: str, video: VideoScan, wanted: Sequence[int], conceal_damage: bool = False) -> Iterator[np.ndarray]:
    """PyAV with its bundled FFmpeg: seeks to key frames where times are reliable, otherwise counts."""
    try:
        if not video.seekable:
            yield from _read_counting(path, video, wanted, conceal_damage)
            return
        sent = 0
        try:
            for image in _read_seeking(path, video, wanted, conceal_damage, allow_seek=True):
                yield image
                sent += 1
        except _SeekMissed:
            # Some indexes lie about key frames: go through the file from its start instead.
            logger.debug("%s: seeking misses frames, decoding sequentially", path)
            yield from _read_seeking(path, video, wanted[sent:], conceal_damage, allow_seek=False)
    except av.error.FFmpegError as error:
        raise MediaError(path, f"damaged or not decodable ({error})") from error


class _SeekMissed(Exception):
    """After a seek the decoder started behind the wanted frame."""


def _read_counting(path: str, video: VideoScan, wanted: Sequence[int], conceal: bool) -> Iterator[np.ndarray]:
    remaining = iter(wanted)
    target: int | None = next(remaining)
    with av.open(path) as container:
        stream = _configured(video_stream(container, path), conceal)
        for index, frame in enumerate(container.decode(stream)):
            if index != target:
                continue
            yield _to_rgb(frame, path, index, video.info.rotation)
            target = next(remaining, None)
            if target is None:
                return
    raise MediaError(path, f"frame {target} is missing: the file ends early or is damaged")


def _read_seeking(
    path: str, video: VideoScan, wanted: Sequence[int], conceal: bool, allow_seek: bool
) -> Iterator[np.ndarray]:
    with av.open(path) as container:
        stream = _configured(video_stream(container, path), conceal)
        frames, last, sought = None, -1, False
        for index in wanted:
            target = int(video.times[index])
            key = int(video.keyframes[max(int(np.searchsorted(video.keyframes, index, side="right")) - 1, 0)])
            if allow_seek and key > last + SEEK_GAP and key <= index:
                container.seek(int(video.times[key]), stream=stream, backward=True, any_frame=False)
                frames, sought = container.decode(stream), True
            elif frames is None:
                frames = container.decode(stream)
            for frame in frames:
                if frame.pts is None or frame.pts < target:
                    continue
                if frame.pts > target:
                    if sought:
                        raise _SeekMissed
                    raise MediaError(path, f"frame {index} cannot be decoded (damaged)")
                yield _to_rgb(frame, path, index, video.info.rotation)
                break
            else:
                if sought:
                    raise _SeekMissed
                raise MediaError(path, f"frame {index} is missing: the file ends early or is damaged")
            last = index


def _configured(stream: av.VideoStream, conceal: bool) -> av.VideoStream:
    stream.thread_type = "AUTO"
    if not conceal:
        # By default FFmpeg paints over damaged parts and says so only in its log.
        stream.codec_context.options = {"err_detect": "explode"}
    return stream


def _to_rgb(frame: av.VideoFrame, path: str, index: int, rotation: int) -> np.ndarray:
    """RGB pixels, turned like the first frame: an orientation in the stream is written once and holds until the end."""
    if frame.is_corrupt:
        raise MediaError(path, f"frame {index} is damaged")
    image = frame.to_ndarray(format="rgb24")
    return np.rot90(image, rotation // 90) if rotation else image


def _chunks(frames: Iterator[np.ndarray]) -> Iterator[list[np.ndarray]]:
    chunk: list[np.ndarray] = []
    for frame in frames:
        if chunk and frame.shape != chunk[0].shape:
            yield chunk
            chunk = []
        chunk.append(frame)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
