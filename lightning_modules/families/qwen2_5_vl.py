"""Qwen2.5-VL: windowed vision attention, temporal positions in units of real time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_modules.families.qwen2_vl import Qwen2VLFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel


class Qwen2_5VLFamily(Qwen2VLFamily):
    """Qwen2.5-VL. Temporal patches lie `tokens_per_second * temporal_patch_size / fps` positions apart."""

    name = "qwen2_5_vl"

    @property
    def model_type(self) -> str:
        """See `ModelFamily.model_type`."""
        return "qwen2_5_vl"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.model_class`."""
        from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration

    @property
    def body_class(self) -> type[PreTrainedModel]:
        """See `GridVisionFamily.body_class`."""
        from transformers import Qwen2_5_VLModel

        return Qwen2_5_VLModel

    def _rope_arguments(self, video_fps: Sequence[float]) -> dict[str, Any]:
        patch = self.config.vision_config.temporal_patch_size
        return {"second_per_grid_ts": [patch / fps for fps in video_fps]} if video_fps else {}
