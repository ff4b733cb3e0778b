"""Qwen3.5 (dense): three Gated DeltaNet layers for every full-attention layer, Qwen3-VL's vision prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.gated_delta import make_segmented
from lightning_modules.families.grid_vision import GridVisionFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Qwen3_5Family(GridVisionFamily):
    """Qwen3.5. All layouts are exact: linear-attention layers follow the plan too (see `gated_delta`)."""

    name = "qwen3_5"

    @property
    def model_type(self) -> str:
        """See `ModelFamily.model_type`."""
        return "qwen3_5"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.model_class`."""
        from transformers import Qwen3_5ForConditionalGeneration

        return Qwen3_5ForConditionalGeneration

    @property
    def body_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.body_class`."""
        from transformers import Qwen3_5Model

        return Qwen3_5Model

    def _prepare(self, model: PreTrainedModel) -> PreTrainedModel:
        model = super()._prepare(model)
        make_segmented(model)
        return model
