"""Tiny random models of every family beside Qwen3-VL, with real processors, for tests."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from datamodules.demo.tiny_model import CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer

FAMILIES = {
    "glm4v": "lightning_modules.families.glm4v.Glm4vFamily",
    "qwen2_vl": "lightning_modules.families.qwen2_vl.Qwen2VLFamily",
    "qwen2_5_vl": "lightning_modules.families.qwen2_5_vl.Qwen2_5VLFamily",
    "qwen3_vl": "lightning_modules.families.qwen3_vl.Qwen3VLFamily",
    "qwen3_5": "lightning_modules.families.qwen3_5.Qwen3_5Family",
}


def family_of(name: str):
    """A new family object."""
    module, cls = FAMILIES[name].rsplit(".", 1)
    return getattr(import_module(module), cls)()


def _text(ids: dict[str, int], **more) -> dict:
    return {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        **more,
    }


def _ids(tokenizer) -> tuple[dict[str, int], dict[str, int]]:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    names = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    return ids, names


def _qwen2_vl(tokenizer):
    import transformers as t

    ids, names = _ids(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    config = t.Qwen2VLConfig(
        text_config=_text(ids, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        **names,
    )
    processor = t.Qwen2VLProcessor(
        image_processor=t.Qwen2VLImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        video_processor=t.Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return t.Qwen2VLForConditionalGeneration(config), processor


def _qwen2_5_vl(tokenizer):
    import transformers as t

    ids, names = _ids(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    config = t.Qwen2_5_VLConfig(
        text_config=_text(ids, rope_parameters=rope),
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2,
        },
        **names,
    )  # fmt: skip
    processor = t.Qwen2_5_VLProcessor(
        image_processor=t.Qwen2VLImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        video_processor=t.Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return t.Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_5(tokenizer):
    import transformers as t

    ids, names = _ids(tokenizer)
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    config = t.Qwen3_5Config(
        text_config=_text(
            ids, num_hidden_layers=3, head_dim=32, rope_parameters=rope, linear_num_key_heads=1,
            linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        **names,
    )  # fmt: skip
    processor = t.Qwen3VLProcessor(
        image_processor=t.Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2),
        video_processor=t.Qwen3VLVideoProcessor(patch_size=16, merge_size=2, temporal_patch_size=2),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    return t.Qwen3_5ForConditionalGeneration(config), processor


GLM_TOKENS = (
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
)  # fmt: skip


def _glm4v(tokenizer):
    import transformers as t

    ids, _ = _ids(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(GLM_TOKENS)})
    image, video, *delimiters = (tokenizer.convert_tokens_to_ids(token) for token in GLM_TOKENS)
    names = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}
    config = t.Glm4vConfig(
        text_config=_text(ids, vocab_size=len(tokenizer), rope_parameters=rope),
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "image_size": 56,
        },
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        **dict(zip(names, delimiters, strict=True)),
    )  # fmt: skip
    processor = t.Glm4vProcessor(
        image_processor=t.Glm4vImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        video_processor=t.Glm4vVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE.replace(
            "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
        ).replace("<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>"),
    )
    return t.Glm4vForConditionalGeneration(config), processor


BUILDERS = {"glm4v": _glm4v, "qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_5": _qwen3_5}


STD = {"qwen3_5": 0.1}
"""Float32 recurrences amplify rounding with the weights' scale; at 0.1 a wrong position still shows."""


def build(name: str, folder: Path, corpus: list[str]) -> Path:
    """Save a tiny model of family `name`; weights sharp enough that a wrong position shows in the log-probs."""
    torch.manual_seed(0)
    model, processor = BUILDERS[name](train_tokenizer(corpus))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, STD.get(name, 0.15))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
