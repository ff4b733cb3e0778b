"""Which frames of a video are used, at what size, and how many visual tokens they become: arithmetic, no decoding.

The sampling and size rule is the one of qwen-vl-utils 0.0.14 (https://github.com/QwenLM/Qwen3-VL), on which the
models' own numbers rest. Where that rule has no answer (a single frame, an empty part) ours is written down here:
one frame is repeated to fill a temporal patch, a part shorter than a frame is the frame nearest to its middle.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from datamodules.errors import MediaError

if TYPE_CHECKING:
    from typing import Self

    from transformers import ProcessorMixin

TimestampStyle = Literal["seconds", "frames", "none"]

MAX_ASPECT_RATIO = 200
VIDEO_MIN_TOKENS = 128
VIDEO_MAX_TOKENS = 768
IMAGE_MIN_TOKENS = 4
IMAGE_MAX_TOKENS = 16384
TOTAL_TOKENS = 128_000 * 0.9
"""Visual tokens of one video when the user sets no total: nine tenths of a 128k context."""


@dataclass(frozen=True)
class MediaSpec:
    """How a model family cuts media into patches and writes them into the prompt; the family builds it.

    Example: Qwen3-VL has patch 16, merge 2 and temporal patch 2, so sizes are multiples of `factor == 32`, and each
    temporal patch is preceded by its time, `<0.3 seconds>`.
    """

    patch_size: int
    merge_size: int
    temporal_patch: int
    image_token: str
    """Placeholder of image features, one per visual token."""
    video_token: str
    image_token_id: int
    video_token_id: int
    frame_start: str
    """Opens the tokens of one temporal patch where times are written."""
    frame_end: str
    timestamp_style: TimestampStyle
    """`seconds`: every temporal patch is its time (the middle, one decimal) and a start/end pair of its own;
    `frames`: a start/end pair around image tokens, then the whole seconds of its first frame; `none`: one run."""
    reserved_tokens: tuple[str, ...]
    """What only media may bring into a prompt; a user's text must not contain it."""

    @property
    def factor(self) -> int:
        """Sizes in pixels are multiples of this."""
        return self.patch_size * self.merge_size


class MediaFamily(Protocol):
    """What the data stage asks of a model family. Families live further down the line and are handed in."""

    def open(self, path: str) -> Self:
        """Read the configuration of the model at `path` (folder or hub name)."""
        ...

    def media_spec(self, processor: ProcessorMixin) -> MediaSpec:
        """How the opened model, with its Hugging Face processor, wants media.

        Raises:
            ValueError: model and processor do not belong together.
        """
        ...


@dataclass(frozen=True)
class VideoInfo:
    """What a container says about its video, without decoding it."""

    num_frames: int
    """Frames that a sequential decode delivers."""
    fps: float
    """Average frames per second; times of frames are index / fps."""
    width: int
    """Pixels, after rotation."""
    height: int
    rotation: int = 0
    """Degrees counter-clockwise that the stored frames are turned for display: 0, 90, 180 or 270."""

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.num_frames / self.fps


@dataclass(frozen=True)
class VideoPlan:
    """The outcome of applying a `VideoSpec` to one video: everything but the pixels.

    Example: 187 frames at 6.105 fps, sampled at 2 fps, give 60 indices from 0 to 186.
    """

    indices: tuple[int, ...]
    """Source frame of each of the T used frames; repeated where the video is too short."""
    fps: float
    """The source's frames per second."""
    num_source_frames: int
    """Frames of the used part (all of the video without start and end)."""
    height: int
    """Pixels after resizing."""
    width: int
    grid: tuple[int, int, int]
    """(temporal, vertical, horizontal) patches before the spatial merge."""
    merge_size: int
    temporal_patch: int

    @property
    def num_frames(self) -> int:
        """T, a multiple of the temporal patch."""
        return len(self.indices)

    @property
    def num_tokens(self) -> int:
        """Visual tokens, times and start/end tokens not counted."""
        return self.grid[0] * self.grid[1] * self.grid[2] // self.merge_size**2

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each temporal patch: the middle between its first and last frame."""
        step = self.temporal_patch
        seconds = [index / self.fps for index in self.indices]
        return tuple((seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step))


@dataclass(frozen=True)
class VideoSpec:
    """How videos are sampled and resized. One object serves caching, training and evaluation.

    Example: `VideoSpec(fps=2, max_frames=128, max_pixels=262144, patch_size=16)` on a 10-minute 640x360 clip gives
    128 frames of 640x352.
    """

    fps: float = 2.0
    """Sampled frames per second of video."""
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None
    """Pixels of a frame; None = 128 visual tokens."""
    max_pixels: int | None = None
    """Pixels of a frame; None = bounded by 768 visual tokens and `total_pixels` only."""
    total_pixels: float | None = None
    """Pixels of all frames of a video divided by the temporal patch; None = 0.9 * 128,000 visual tokens."""
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch: int = 2
    decoder: str = "pyav"
    """`pyav`, `torchcodec` or `decord`."""
    conceal_damage: bool = False
    """Use what the decoder guesses for damaged parts of a stream; off = such a video is refused."""
    pin_decoder: bool = False
    """Make the decoder part of the cache key; off, so that neither an upgrade nor another decoder voids a cache."""

    def __post_init__(self) -> None:
        if self.fps <= 0:
            raise ValueError(f"fps={self.fps} must be positive")
        if self.max_frames < self.temporal_patch:
            raise ValueError(f"max_frames={self.max_frames} is less than one temporal patch of {self.temporal_patch}")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames={self.min_frames} is larger than max_frames={self.max_frames}")
        if self.max_pixels is not None and self.max_pixels < self.frame_min_pixels:
            raise ValueError(
                f"video max_pixels={self.max_pixels} is less than min_pixels={self.frame_min_pixels}; lower min_pixels"
            )

    @classmethod
    def for_rules(cls, rules: MediaSpec, **values: Any) -> VideoSpec:
        """A spec whose patch sizes are the model family's."""
        sizes = {k: getattr(rules, k) for k in ("patch_size", "merge_size", "temporal_patch")}
        return cls(**values, **sizes)

    @property
    def factor(self) -> int:
        """Height and width are multiples of this."""
        return self.patch_size * self.merge_size

    @property
    def frame_min_pixels(self) -> int:
        """Lower bound of a frame's pixels."""
        return VIDEO_MIN_TOKENS * self.factor**2 if self.min_pixels is None else self.min_pixels

    def fingerprint(self) -> dict[str, Any]:
        """The fields that decide which pixels come out; part of the cache key."""
        fields = asdict(self)
        if not self.pin_decoder:
            fields.pop("decoder")
        fields["rule"] = "qwen-vl-utils-0.0.14"
        return fields

    @property
    def digest(self) -> str:
        """Short hex digest of `fingerprint`."""
        return hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()[:16]

    def frame_range(self, info: VideoInfo, start: float | None, end: float | None) -> tuple[int, int]:
        """First and last frame (inclusive) of the part between `start` and `end` seconds."""
        if info.fps <= 0 or info.num_frames <= 0:
            raise ValueError(f"a video needs frames and a rate, got {info.num_frames} frames at {info.fps} fps")
        last, duration = info.num_frames - 1, info.duration
        if start is not None and end is not None and start > end:
            raise ValueError(f"start={start} s lies after end={end} s")
        first = 0 if start is None else math.ceil(max(0.0, min(start, duration)) * info.fps)
        if end is not None:
            last = min(math.floor(max(0.0, min(end, duration)) * info.fps), last)
        if first < last:
            return first, last
        # The part holds at most one frame: take the one nearest to its middle.
        low = 0.0 if start is None else max(0.0, min(start, duration))
        high = duration if end is None else max(0.0, min(end, duration))
        nearest = min(round((low + high) / 2 * info.fps), info.num_frames - 1)
        return nearest, nearest

    def count_frames(self, total: int, fps: float) -> int:
        """How many of `total` frames are used; 0 when there are too few to fill a temporal patch."""
        unit = self.temporal_patch
        low = math.ceil(self.min_frames / unit) * unit
        high = math.floor(self.max_frames / unit) * unit
        count = min(min(max(total / fps * self.fps, low), high), total)
        return math.floor(count / unit) * unit

    def indices(self, info: VideoInfo, start: float | None = None, end: float | None = None) -> tuple[int, ...]:
        """Source indices of the used frames, evenly spaced, always a multiple of the temporal patch."""
        import torch

        first, last = self.frame_range(info, start, end)
        total = last - first + 1
        count = self.count_frames(total, info.fps)
        if count == 0:
            count = self.temporal_patch
            if total < count:
                return tuple(range(first, last + 1)) + (last,) * (count - total)
        # In float32 like the peer: another precision moves some indices by one.
        return tuple(torch.linspace(first, last, count).round().long().tolist())

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels after resizing a video of `num_frames` used frames."""
        total = TOTAL_TOKENS * self.factor**2 if self.total_pixels is None else self.total_pixels
        low = self.frame_min_pixels
        share = total / num_frames * self.temporal_patch
        high = max(min(VIDEO_MAX_TOKENS * self.factor**2, share), int(low * 1.05))
        if self.max_pixels is not None:
            high = min(self.max_pixels, high)
        return fit_size(height, width, self.factor, low, high)

    def plan(
        self, info: VideoInfo, start: float | None = None, end: float | None = None, path: object = "video"
    ) -> VideoPlan:
        """Apply the spec to one video.

        Raises:
            MediaError: the video or the part cannot be used (no frames, extreme aspect ratio, start after end).
        """
        try:
            first, last = self.frame_range(info, start, end)
            indices = self.indices(info, start, end)
            height, width = self.resized(len(indices), info.height, info.width)
        except ValueError as error:
            raise MediaError(path, str(error)) from error
        grid = (len(indices) // self.temporal_patch, height // self.patch_size, width // self.patch_size)
        return VideoPlan(
            indices=indices,
            fps=info.fps,
            num_source_frames=last - first + 1,
            height=height,
            width=width,
            grid=grid,
            merge_size=self.merge_size,
            temporal_patch=self.temporal_patch,
        )


@dataclass(frozen=True)
class ImageSpec:
    """How images are resized; its budget is independent of the videos'."""

    min_pixels: int | None = None
    """None = 4 visual tokens."""
    max_pixels: int | None = None
    """None = 16,384 visual tokens."""
    patch_size: int = 16
    merge_size: int = 2

    def __post_init__(self) -> None:
        low, high = self.bounds
        if high < low:
            raise ValueError(f"image max_pixels={high} is less than min_pixels={low}")

    @classmethod
    def for_rules(cls, rules: MediaSpec, **values: Any) -> ImageSpec:
        """A spec whose patch sizes are the model family's."""
        return cls(**values, patch_size=rules.patch_size, merge_size=rules.merge_size)

    @property
    def factor(self) -> int:
        """Height and width are multiples of this."""
        return self.patch_size * self.merge_size

    @property
    def bounds(self) -> tuple[int, int]:
        """(min, max) pixels."""
        low = IMAGE_MIN_TOKENS * self.factor**2 if self.min_pixels is None else self.min_pixels
        high = IMAGE_MAX_TOKENS * self.factor**2 if self.max_pixels is None else self.max_pixels
        return low, high

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels after resizing."""
        return fit_size(height, width, self.factor, *self.bounds)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches of an image of the original size `height` x `width`."""
        height, width = self.resized(height, width)
        return (1, height // self.patch_size, width // self.patch_size)


def fit_size(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Nearest (height, width) that are multiples of `factor` with min_pixels <= area <= max_pixels.

    Raises:
        ValueError: the aspect ratio exceeds 200.
    """
    if min(height, width) < 1:
        raise ValueError(f"size {height}x{width} is empty")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"aspect ratio {ratio:.0f} of size {height}x{width} exceeds {MAX_ASPECT_RATIO}")
    high = max(factor, round(height / factor) * factor)
    wide = max(factor, round(width / factor) * factor)
    if high * wide > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        high = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif high * wide < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return high, wide
