"""Turn samples into prompts: media from the cache, tokens by arithmetic. Runs in loader workers.

Pixels are resized and no more; the trainer cuts them into patches (`lightning_modules.layouts.patchify`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.images import load_image
from datamodules.types import MediaRef, PreparedSample
from datamodules.video.spec import ImageSpec, MediaSpec, VideoSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from datamodules.prompts import PromptTemplates
    from datamodules.types import Sample
    from datamodules.video.cache import VideoCache


class SamplePreparer:
    """Prepares samples one by one.

    Args:
        processor: the model's Hugging Face processor (tokenizer and chat template are used, pixels are not).
        rules: how the family writes media into prompts.
        video_spec: sampling and size of videos.
        image_spec: size of images.
        cache: where clips come from; also knows the media root.
        templates: prompt templates.
        max_prompt_tokens: longer prompts raise; they are never cut. None = no limit.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        rules: MediaSpec,
        video_spec: VideoSpec,
        image_spec: ImageSpec,
        cache: VideoCache,
        templates: PromptTemplates,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.processor = processor
        self.rules = rules
        self.video_spec = video_spec
        self.image_spec = image_spec
        self.cache = cache
        self.templates = templates
        self.max_prompt_tokens = max_prompt_tokens

    def prompt_text(self, sample: Sample) -> str:
        """The chat-templated prompt with one placeholder per medium.

        Raises:
            ValueError: the sample's text contains a placeholder token, or its media tags do not fit its media.
        """
        messages = self.templates.messages(sample)
        for part in messages[-1]["content"]:
            check_text(part.get("text", ""), self.rules)
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def spec_for(self, ref: MediaRef) -> VideoSpec:
        """The video spec of one medium: a record may give a video its own rate."""
        return self.video_spec if ref.fps is None else replace(self.video_spec, fps=ref.fps)

    def prepare(self, sample: Sample) -> PreparedSample:
        """Load the media and tokenise the prompt.

        Raises:
            MediaError: a medium cannot be used.
            ValueError: the text does not fit the media, or the prompt is longer than `max_prompt_tokens`.
        """
        text = self.prompt_text(sample)
        images = tuple(load_image(self.cache.source(ref), self.image_spec) for ref in sample.images)
        videos = tuple(self.cache.load(ref, self.spec_for(ref)) for ref in sample.videos)
        prompt_ids = tuple(self.processor.tokenizer(text)["input_ids"])
        image_texts = [image_run(image.grid, self.rules) for image in images]
        video_texts = [
            video_run(video.grid, video.metadata.frames_indices or (), video.metadata.fps or 0.0, self.rules)
            for video in videos
        ]
        expanded = expand(text, image_texts, video_texts, self.rules, self.processor.tokenizer)
        if self.max_prompt_tokens is not None and len(expanded) > self.max_prompt_tokens:
            raise OverlongError(sample.uid, len(expanded), self.max_prompt_tokens)
        return PreparedSample(
            sample=sample,
            prompt_text=text,
            prompt_ids=prompt_ids,
            expanded_ids=expanded,
            images=images,
            videos=videos,
        )


class OverlongError(ValueError):
    """A prompt that is longer than allowed. Multimodal prompts are dropped, never cut."""

    def __init__(self, uid: str, length: int, limit: int) -> None:
        super().__init__(f"sample {uid}: the prompt has {length} tokens, max_prompt_tokens is {limit}")
        self.uid, self.length, self.limit = uid, length, limit

    def __reduce__(self) -> tuple:
        return type(self), (self.uid, self.length, self.limit)


Run = tuple[tuple[str, int], ...]
"""Text pieces of one medium: (text, repeats). A piece with repeats > 1 is a single placeholder token."""


def image_run(grid: tuple[int, int, int], rules: MediaSpec) -> Run:
    """What an image placeholder becomes: its token, once per merged patch."""
    return ((rules.image_token, grid[0] * grid[1] * grid[2] // rules.merge_size**2),)


def video_run(grid: tuple[int, int, int], indices: Sequence[int], fps: float, rules: MediaSpec) -> Run:
    """What a video placeholder becomes.

    Example (Qwen3-VL, grid (2, 4, 6)): `<0.2 seconds>` start 6 x pad end `<1.3 seconds>` start 6 x pad end.

    Args:
        grid: temporal, vertical and horizontal patches.
        indices: source frames, `rules.temporal_patch` for each temporal patch.
        fps: the source's frames per second.
        rules: the family's way of writing.
    """
    per_patch = grid[1] * grid[2] // rules.merge_size**2
    if rules.timestamp_style == "none":
        return ((rules.video_token, grid[0] * per_patch),)
    step = rules.temporal_patch
    if len(indices) != grid[0] * step:
        raise ValueError(f"{len(indices)} frames for {grid[0]} temporal patches of {step}")
    run: list[tuple[str, int]] = []
    for i in range(0, len(indices), step):
        first, last = indices[i] / fps, indices[i + step - 1] / fps
        if rules.timestamp_style == "seconds":
            run += [
                (f"<{(first + last) / 2:.1f} seconds>{rules.frame_start}", 1),
                (rules.video_token, per_patch),
            ]
            run.append((rules.frame_end, 1))
        else:
            run += [(rules.frame_start, 1), (rules.image_token, per_patch)]
            run.append((f"{rules.frame_end}{int(first)}", 1))
    return tuple(run)


def expand(
    text: str, images: Sequence[Run], videos: Sequence[Run], rules: MediaSpec, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Token ids with every visual token, as the Hugging Face processor would give them.

    Placeholders are tokens of their own, so a run of them can be tokenised as one and repeated afterwards.

    Raises:
        ValueError: the numbers of placeholders and media differ.
    """
    queues = {rules.image_token: list(images), rules.video_token: list(videos)}
    repeats: list[int] = []
    pieces: list[str] = []
    pattern = "|".join(re.escape(token) for token in queues)
    for piece in re.split(f"({pattern})", text):
        if piece not in queues:
            pieces.append(piece)
            continue
        if not queues[piece]:
            raise ValueError(f"more {piece} placeholders than media in the prompt")
        for part, count in queues[piece].pop(0):
            pieces.append(part)
            if part in queues:
                repeats.append(count)
    left = {token: len(queue) for token, queue in queues.items() if queue}
    if left:
        raise ValueError(f"media without a placeholder in the prompt: {left}")
    ids = tokenizer("".join(pieces))["input_ids"]
    single = {rules.image_token_id, rules.video_token_id}
    counts = iter(repeats)
    out: list[int] = []
    for token in ids:
        out += [token] * next(counts) if token in single else [token]
    return tuple(out)


def check_text(text: str, rules: MediaSpec) -> None:
    """Refuse user text that contains a placeholder: it would be counted as a medium.

    Raises:
        ValueError: naming the token.
    """
    for token in rules.reserved_tokens:
        if token in text:
            raise ValueError(f"the text contains the reserved token {token}")


def load_processor(model_path: str | Path) -> ProcessorMixin:
    """Load a model folder's processor, without remote code.

    Raises:
        ValueError: the folder does not exist or holds no processor.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(str(model_path))
    except OSError as error:
        raise ValueError(f"no processor at model_path={str(model_path)!r}: {error}") from error
