"""Qwen2.5-VL: windowed vision attention, temporal positions in units of real time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_modules.families.qwen2_vl import Qwen2VLFamily

if TYPE_CHECKING:
    from collections.abc import Sequence


class Qwen2_5VLFamily(Qwen2VLFamily):
    """Qwen2.5-VL. Temporal patches lie `tokens_per_second * temporal_patch_size / fps` positions apart."""

    name = model_type = "qwen2_5_vl"
    architecture = "Qwen2_5_VL"

    def seconds_per_grid(self, video_fps: Sequence[float]) -> list[float]:
        """See `ModelFamily.seconds_per_grid`.

        The processor takes one rate for all videos, 2 frames per second unless told otherwise, and does not read the
        metadata: every other sampling would place the frames at wrong times.
        """
        return [self.config.vision_config.temporal_patch_size / float(fps) for fps in video_fps]
