"""Qwen2-VL: M-RoPE with consecutive temporal positions; checkpoints keep the first release's names."""

from __future__ import annotations

from lightning_modules.families.grid_vision import GridVisionFamily


class Qwen2VLFamily(GridVisionFamily):
    """Qwen2-VL. In checkpoints the tower is `visual.*` and the language model `model.*`."""

    name = model_type = "qwen2_vl"
    architecture = "Qwen2VL"

    def to_checkpoint_name(self, name: str) -> str:
        """See `ModelFamily.to_checkpoint_name`."""
        name = super().to_checkpoint_name(name)
        if name.startswith("model.visual."):
            return name.removeprefix("model.")
        return name.replace("model.language_model.", "model.", 1)
