"""Build a tiny, randomly initialised Qwen3-VL with its processor: the real architecture at 0.6 M parameters.

The laptop demo and the tests run on it. Everything is drawn from the seed and saved as an ordinary Hugging Face
folder, so that loading goes the same way as for a released checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from datamodules.common.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ANSWER_TOKENS = ("<answer>", "</answer>")
"""Ordinary (not special) tokens: they survive decoding, and an answer costs few tokens."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class TinyInit:
    """Standard deviations of the normal initialisation. transformers' default of 0.02 does not learn at this size."""

    vision: float = 0.15
    patch_embedding: float = 0.05
    text: float = 0.15


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any UTF-8 text encodes without an unknown token.

    Args:
        corpus: texts whose frequent byte sequences become tokens.
        vocab_size: total size, specials included; at least 272.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    needed = len(alphabet) + len(SPECIAL_TOKENS) + len(ANSWER_TOKENS)
    if vocab_size < needed:
        raise ValueError(f"vocab_size={vocab_size} cannot hold 256 bytes and the special tokens; use at least {needed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ANSWER_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ANSWER_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def tiny_config(tokenizer: PreTrainedTokenizerFast, vocab_size: int = 512, tie_word_embeddings: bool = False):
    """Qwen3-VL configuration of 0.6 M parameters around `tokenizer`'s special ids."""
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": tie_word_embeddings,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie_word_embeddings,
    )


def initialise(model: PreTrainedModel, seed: int, init: TinyInit) -> None:
    """Overwrite every matrix of `model` from `seed`; norms become 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = init.patch_embedding if "patch_embed" in name else init.vision if "visual" in name else init.text
            parameter.normal_(0.0, std, generator=generator)


def build_tiny_model(
    folder: str | Path,
    corpus: Iterable[str],
    seed: int = 0,
    vocab_size: int = 512,
    tie_word_embeddings: bool = False,
    init: TinyInit | None = None,
) -> Path:
    """Save a tiny Qwen3-VL (float32 safetensors, tokenizer, processor, chat template) under `folder`.

    A folder that already holds the same build is left as it is.

    Args:
        folder: target; created if missing.
        corpus: prompts and answers the tokenizer is trained on.
        seed: seed of the weights.
    """
    folder = Path(folder)
    corpus = list(corpus)
    recipe = {
        "seed": seed,
        "vocab_size": vocab_size,
        "tied": tie_word_embeddings,
        "corpus": hashlib.sha256("\0".join(corpus).encode()).hexdigest()[:16],
        "version": 2,
    }
    marker = folder / "tiny_recipe.json"
    if marker.is_file() and json.loads(marker.read_text()) == recipe:
        return folder
    tokenizer = train_tokenizer(corpus, vocab_size)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2),
        video_processor=Qwen3VLVideoProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, cap_pixels_per_frame=True
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    model = Qwen3VLForConditionalGeneration(tiny_config(tokenizer, vocab_size, tie_word_embeddings))
    initialise(model, seed, init or TinyInit())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    write_json(marker, recipe)
    return folder
