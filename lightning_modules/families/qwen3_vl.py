"""Qwen3-VL (dense): interleaved M-RoPE, text timestamps between video frames, deepstack vision features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.qwen_vl import QwenVLFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Qwen3VLFamily(QwenVLFamily):
    """Qwen3-VL. Checkpoint names equal module names; deepstack mergers count as merger."""

    name = "qwen3_vl"
    merger_names = ("visual.merger.", "visual.deepstack_merger_list.")

    @property
    def model_type(self) -> str:
        """See `ModelFamily.model_type`."""
        return "qwen3_vl"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """See `QwenVLFamily.model_class`."""
        from transformers import Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration

    @property
    def body_class(self) -> type[PreTrainedModel]:
        """See `QwenVLFamily.body_class`."""
        from transformers import Qwen3VLModel

        return Qwen3VLModel
