"""GLM-4.1V: patch grids and M-RoPE like Qwen, but one placeholder for both media and frames encoded one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.grid_vision import GridVisionFamily

if TYPE_CHECKING:
    import torch


class Glm4vFamily(GridVisionFamily):
    """GLM-4.1V. Image placeholders between the video delimiters stand for video features."""

    name = model_type = "glm4v"
    architecture = "Glm4v"
    merger_names = ("visual.merger.", "visual.downsample.")
    delimiter_keys = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
    timestamp_style = "frames"

    def media_kinds(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `ModelFamily.media_kinds`."""
        opened = (input_ids == self.config.video_start_token_id).int().cumsum(-1)
        closed = (input_ids == self.config.video_end_token_id).int().cumsum(-1)
        placeholder = (input_ids == self.image_token_id).int()
        return placeholder * (1 + (opened > closed).int())

    def _tower_grids(self, video_grids: torch.Tensor) -> torch.Tensor:
        frames = video_grids.repeat_interleave(video_grids[:, 0], dim=0)
        frames[:, 0] = 1
        return frames
