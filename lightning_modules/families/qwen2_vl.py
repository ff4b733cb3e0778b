"""Qwen2-VL: M-RoPE with consecutive temporal positions; checkpoints keep the first release's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.grid_vision import GridVisionFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Qwen2VLFamily(GridVisionFamily):
    """Qwen2-VL. In checkpoints the tower is `visual.*` and the language model `model.*`."""

    name = "qwen2_vl"

    @property
    def model_type(self) -> str:
        """See `ModelFamily.model_type`."""
        return "qwen2_vl"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.model_class`."""
        from transformers import Qwen2VLForConditionalGeneration

        return Qwen2VLForConditionalGeneration

    @property
    def body_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.body_class`."""
        from transformers import Qwen2VLModel

        return Qwen2VLModel

    def to_checkpoint_name(self, name: str) -> str:
        """See `ModelFamily.to_checkpoint_name`."""
        name = super().to_checkpoint_name(name)
        if name.startswith("model.visual."):
            return name.removeprefix("model.")
        return name.replace("model.language_model.", "model.", 1)
