"""Pixels of one prompt's media as the vision tower reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from datamodules.prepare import MediaProcessor
    from datamodules.types import PreparedSample
    from lightning_modules.families.base import Grid


@dataclass(frozen=True)
class Patches:
    """Flattened patches of one prompt's media."""

    images: torch.Tensor | None
    """float32 [P, C] of all images in prompt order, or None."""
    videos: torch.Tensor | None
    """float32 [P, C] of all videos in prompt order, or None."""
    image_grids: tuple[Grid, ...] = ()
    video_grids: tuple[Grid, ...] = ()


class Patchifier:
    """Patches of a sample, images and videos apart (a micro-batch holds all images first).

    Args:
        media: the data stage's processor; it also checks that grids are the prepared ones.
        device: where rescaling and patching run.
    """

    def __init__(self, media: MediaProcessor, device: torch.device | None = None) -> None:
        self.media = media
        self.device = device

    @classmethod
    def from_path(cls, path: str, device: torch.device | None = None) -> Patchifier:
        """The patchifier of the model at `path`."""
        from datamodules.prepare import MediaProcessor, load_processor

        return cls(MediaProcessor(load_processor(path)), device)

    def __call__(self, sample: PreparedSample) -> Patches:
        """Patches of `sample`'s media."""
        out = self.media.patchify([sample], self.device)
        pixels, split = out.pixel_values, out.num_image_patches
        return Patches(
            images=pixels[:split] if sample.images else None,
            videos=pixels[split:] if sample.videos else None,
            image_grids=tuple(image.grid for image in sample.images),
            video_grids=tuple(video.grid for video in sample.videos),
        )
