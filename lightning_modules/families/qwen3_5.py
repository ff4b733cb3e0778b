"""Qwen3.5 (dense): three Gated DeltaNet layers for every full-attention layer, Qwen3-VL's vision prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.grid_vision import GridVisionFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Qwen3_5Family(GridVisionFamily):
    """Qwen3.5. All layouts are exact: linear-attention layers follow the plan too (see `gated_delta`)."""

    name = model_type = "qwen3_5"
    architecture = "Qwen3_5"
    timestamp_style = "seconds"

    def _prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        model = super()._prepare(model)
        from lightning_modules.families.gated_delta import make_segmented  # imports transformers' model

        make_segmented(model)
        return model
