"""From a benchmark's item to the engine's prompt, with the code that training uses; runs in the pool's processes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from datamodules.errors import MediaError
from datamodules.prepare import SamplePreparer, check_text, load_processor
from datamodules.prompts import PromptTemplates, place_media
from datamodules.video.cache import VideoCache
from datamodules.video.codecs import get_codec
from datamodules.video.decode import check_decoder, get_reader
from datamodules.video.frame_folder import read_frame_folder
from datamodules.video.spec import ImageSpec, MediaFamily, MediaSpec, VideoSpec
from eval.benchmarks.frame_policy import frame_options

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from datamodules.types import MediaRef, PreparedSample, PreparedVideo, Sample
    from eval.benchmarks.types import BenchmarkItem

THUMB_FRAMES = 4
THUMB_WIDTH = 160


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that decides how an item is shown to the model; picklable, part of the run key."""

    model_path: str
    family: MediaFamily
    """The model's family."""
    frame_policy: str = "official"
    """official, qwen3vl or reference."""
    benchmark_frames: Mapping[str, Any] = field(default_factory=dict)
    """The benchmark's own `VideoSpec` options, for the official policy."""
    frame_overrides: Mapping[str, Any] = field(default_factory=dict)
    """`VideoSpec` options on top of the policy's."""
    image_options: Mapping[str, Any] = field(default_factory=dict)
    """`ImageSpec` options."""
    max_prompt_tokens: int | None = None
    """Longer prompts fail, they are never cut."""
    cache_dir: str | None = None
    """Where decoded clips are kept; None = nowhere."""
    cache_codec: str = "lossless"
    decoder: str = "pyav"
    thumbnails: bool = False
    """Also return a small strip of frames per item, for the report."""

    def __post_init__(self) -> None:
        """Refuse what no item could be prepared with. Raises ValueError."""
        VideoSpec(**self._video_options())
        ImageSpec(**self.image_options)
        get_codec(self.cache_codec)
        get_reader(self.decoder)

    def __call__(self) -> ItemPreparer:
        """Build the preparer, in the process that uses it.

        Raises:
            RuntimeError: the decoder cannot be loaded; the message says what to install.
        """
        check_decoder(self.decoder)
        return ItemPreparer(self)

    def video_spec(self, rules: MediaSpec) -> VideoSpec:
        """Sampling and size of videos for a model family."""
        return VideoSpec.for_rules(rules, **self._video_options(rules.factor))

    def _video_options(self, factor: int = 32) -> dict[str, Any]:
        options = frame_options(self.frame_policy, self.benchmark_frames, factor)
        return {**options, "decoder": self.decoder, **self.frame_overrides}

    def model_video_spec(self) -> VideoSpec:
        """`video_spec` of the model's own family; loads its processor."""
        return self.video_spec(self.media_spec(load_processor(self.model_path)))

    def media_spec(self, processor: ProcessorMixin) -> MediaSpec:
        """How the model's family writes media into prompts."""
        return self.family.open(self.model_path).media_spec(processor)

    @property
    def is_custom(self) -> bool:
        """Whether frames or images differ from what the frame policy says."""
        return bool(self.frame_overrides or self.image_options or self._is_lossy)

    @property
    def _is_lossy(self) -> bool:
        return self.cache_dir is not None and get_codec(self.cache_codec).lossy

    def key(self) -> dict[str, Any]:
        """The part of the run key that is about frames."""
        return {
            "frames": self._video_options(),
            "images": dict(self.image_options),
            "max_prompt_tokens": self.max_prompt_tokens,
            **({"cache_codec": self.cache_codec} if self._is_lossy else {}),
        }


@dataclass(frozen=True)
class ReadyItem:
    """A prepared item as it comes out of the pool."""

    prompt: PreparedSample
    num_frames: int
    thumbnail: bytes = b""
    """JPEG strip of a few frames; empty when not asked for or without media."""


class _Media(VideoCache):
    """Also reads folders of frames, and keeps the last videos at hand: neighbouring questions are about one video."""

    folder_fps: float | None = None
    """Frames per second of a folder, as the item in work says."""

    def __init__(self, settings: PrepareSettings) -> None:
        super().__init__(settings.cache_dir, codec=settings.cache_codec, threads=1)
        self._recent = lru_cache(maxsize=2)(self._read)

    def load(self, ref: MediaRef, spec: VideoSpec) -> PreparedVideo:
        """See `VideoCache.load`."""
        return self._recent(ref, spec, self.folder_fps)

    def _read(self, ref: MediaRef, spec: VideoSpec, folder_fps: float | None) -> PreparedVideo:
        source = self.source(ref)
        if not source.is_dir():
            return super().load(ref, spec)
        if folder_fps is None:
            raise MediaError(source, "is a folder, and nothing says with how many frames per second it was written")
        return read_frame_folder(source, spec, folder_fps, ref.start, ref.end)


class ItemPreparer(SamplePreparer):
    """Prepares benchmark items: the item's text is the whole user message, its system text and prefix are kept.

    Args:
        settings: see `PrepareSettings`.
    """

    _item: BenchmarkItem
    """The item in work."""
    cache: _Media

    def __init__(self, settings: PrepareSettings) -> None:
        processor = load_processor(settings.model_path)
        rules = settings.media_spec(processor)
        super().__init__(
            processor,
            rules,
            settings.video_spec(rules),
            ImageSpec.for_rules(rules, **settings.image_options),
            _Media(settings),
            PromptTemplates(),
            settings.max_prompt_tokens,
        )
        self._base_spec = self.video_spec
        self._thumbnails = settings.thumbnails

    def __call__(self, item: BenchmarkItem) -> ReadyItem:
        """Prepare one item.

        Raises:
            MediaError: a medium cannot be used; the message names the file.
            ValueError: the text does not fit the media, or the prompt is too long.
        """
        self._item, self.cache.folder_fps = item, item.folder_fps
        self.video_spec = replace(self._base_spec, **item.frame_options) if item.frame_options else self._base_spec
        prompt = self.prepare(item.sample)
        strip = thumbnail(prompt) if self._thumbnails else b""
        frames = sum(len(video.frames) for video in prompt.videos)
        # An ordinary array travels without a copy; a mapped file stays a reference to the file.
        videos = [
            video
            if getattr(video.frames, "source", None) is not None
            else replace(video, frames=np.ascontiguousarray(video.frames).view(np.ndarray))
            for video in prompt.videos
        ]
        return ReadyItem(replace(prompt, videos=tuple(videos)), frames, strip)

    def prompt_text(self, sample: Sample) -> str:
        """The chat-templated prompt, with the official system message and the beginning of the answer."""
        content = place_media(sample.problem, len(sample.images), len(sample.videos))
        for part in content:
            check_text(part.get("text", ""), self.rules)
        system = [{"role": "system", "content": self._item.system}] if self._item.system is not None else []
        messages: list[Any] = [*system, {"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text + self._item.answer_prefix


def media_key(item: BenchmarkItem) -> str:
    """Equal for items about the same videos."""
    return "|".join(f"{ref.path}@{ref.start}-{ref.end}" for ref in (*item.sample.videos, *item.sample.images))


def thumbnail(prompt: PreparedSample) -> bytes:
    """A JPEG strip of a few evenly spaced frames (or the first image); empty without media."""
    if prompt.videos:
        frames = prompt.videos[0].frames
        places = np.linspace(0, len(frames) - 1, min(THUMB_FRAMES, len(frames))).round().astype(int)
        pictures = [Image.fromarray(np.asarray(frames[i]).transpose(1, 2, 0)) for i in places]
    elif prompt.images:
        pictures = [Image.fromarray(prompt.images[0].pixels.transpose(1, 2, 0))]
    else:
        return b""
    height = max(1, round(pictures[0].height * THUMB_WIDTH / pictures[0].width))
    strip = Image.new("RGB", (THUMB_WIDTH * len(pictures), height))
    for i, picture in enumerate(pictures):
        strip.paste(picture.resize((THUMB_WIDTH, height)), (i * THUMB_WIDTH, 0))
    out = io.BytesIO()
    strip.save(out, "JPEG", quality=70)
    return out.getvalue()
