"""Which tokens a response may never hold and which ones end it; engine and trainer read the same answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from datamodules.types import PreparedSample

_VISION_ID = re.compile(r"^(image|video|vision|audio|media)\w*_(token_id|token_index|token)$")
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|end|>")


def placeholder_ids(config: Any, processor: Any = None) -> tuple[int, ...]:
    """Ids of every vision placeholder (image, video, vision start and end), sorted.

    A policy does sample them when it may; one more placeholder than there are visual features breaks the next
    forward. They are read from all attributes of the model's configuration and of its processor whose names say
    image, video, vision, audio or media.

    Args:
        config: a transformers configuration.
        processor: the model's processor; its placeholder *texts* are looked up in its tokenizer.
    """
    found: set[int] = set()
    for name, value in _attributes(config).items():
        if _VISION_ID.match(name) and isinstance(value, int):
            found.add(value)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        for source in (processor, tokenizer):
            for name, value in _attributes(source).items():
                if not _VISION_ID.match(name):
                    continue
                if isinstance(value, int):
                    found.add(value)
                elif isinstance(value, str) and value in vocabulary:
                    found.add(vocabulary[value])
    return tuple(sorted(found))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids after which a response ends, sorted: the tokenizer's end token and the usual end-of-turn tokens it has.

    The model's `generation_config` is not asked: what ends a response must not depend on a file that a fine-tune
    may have changed.
    """
    vocabulary = tokenizer.get_vocab()
    found = {vocabulary[token] for token in _END_TOKENS if token in vocabulary}
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise ValueError("the tokenizer has no end token; set sampling.stop_ids")
    return tuple(sorted(found))


def seconds_per_grid(processor: Any, prompt: PreparedSample) -> list[float]:
    """Seconds between the temporal patches of each video of a prompt, from its metadata.

    Qwen2.5-VL's processor takes one rate for all videos, 2 frames per second unless told otherwise, and does not
    read the metadata: every other sampling would place the frames at wrong times.
    """
    patch = processor.video_processor.temporal_patch_size
    return [patch / float(video.metadata.sampled_fps) for video in prompt.videos]


def model_token_ids(model_path: str | Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(placeholder ids, stop ids) of the model saved under `model_path`."""
    from transformers import AutoConfig, AutoProcessor

    processor = AutoProcessor.from_pretrained(model_path)
    config = AutoConfig.from_pretrained(model_path)
    banned = placeholder_ids(config, processor)
    return banned, tuple(i for i in stop_ids(getattr(processor, "tokenizer", processor)) if i not in banned)


def _attributes(source: Any) -> dict[str, Any]:
    """Plain attributes of a configuration, processor or tokenizer."""
    values = dict(getattr(source, "__dict__", {}))
    to_dict = getattr(source, "to_dict", None)
    if to_dict is not None and not values:
        values.update(to_dict())
    return values
