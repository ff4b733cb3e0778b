"""Qwen3-VL (dense): interleaved M-RoPE, text timestamps between video frames, deepstack vision features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_modules.families.grid_vision import GridVisionFamily

if TYPE_CHECKING:
    import torch

    from lightning_modules.core.types import MicroBatch


class Qwen3VLFamily(GridVisionFamily):
    """Qwen3-VL. Checkpoint names equal module names; deepstack mergers count as merger."""

    name = model_type = "qwen3_vl"
    architecture = "Qwen3VL"
    timestamp_style = "seconds"
    merger_names = ("visual.merger.", "visual.deepstack_merger_list.")

    def _inputs(self, body: Any, batch: MicroBatch, vision: Any) -> dict[str, Any]:
        """Deepstack features enter the first decoder layers, so transformers places all features itself."""
        if batch.pixel_values is None:
            return super()._inputs(body, batch, vision)
        outputs: dict[str, Any] = {}
        start = 0
        for kind, grids in (("image", batch.image_grid_thw), ("video", batch.video_grid_thw)):
            if grids is None:
                continue
            end = start + sum(self.visual_tokens(tuple(g)) for g in grids.tolist())
            part = type(vision)(last_hidden_state=None, pooler_output=(vision.pooler_output[start:end],))
            part.deepstack_features = [(feature[start:end],) for feature in vision.deepstack_features]
            outputs[kind] = part
            start = end
        return {"input_ids": batch.input_ids, "mm_encoder_outputs": outputs}

    def _zero(self, vision: Any) -> torch.Tensor:
        return super()._zero(vision) + 0.0 * sum(feature.sum() for feature in vision.deepstack_features)
