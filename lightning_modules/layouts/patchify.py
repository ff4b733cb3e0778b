"""Pixels of one prompt's media as the vision tower reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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

    @property
    def num_bytes(self) -> int:
        """Memory of the patches."""
        return sum(t.numel() * t.element_size() for t in (self.images, self.videos) if t is not None)


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


class PatchCache:
    """Keeps the patches of a step's samples for its further passes, up to a number of bytes; the rest is made anew.

    Nothing is evicted: passes go over the samples in turn, so the oldest entry would be the one needed next.

    Args:
        patchify: makes the patches of one sample.
        max_bytes: bound on what is kept; 0 = nothing.
    """

    def __init__(self, patchify: Callable[[PreparedSample], Patches], max_bytes: int) -> None:
        self.patchify = patchify
        self.max_bytes = max_bytes
        self.used = 0
        self._keeping = False
        # The sample is kept too: an id is unique only among living objects.
        self._held: dict[int, tuple[PreparedSample, Patches]] = {}

    def begin(self, keep: bool) -> None:
        """Forget everything; keep what is made from now on if `keep`."""
        self._keeping = keep
        self._held.clear()
        self.used = 0

    def __call__(self, sample: PreparedSample) -> Patches:
        """Patches of `sample`'s media."""
        if id(sample) in self._held:
            return self._held[id(sample)][1]
        patches = self.patchify(sample)
        if self._keeping and self.used + patches.num_bytes <= self.max_bytes:
            self._held[id(sample)] = (sample, patches)
            self.used += patches.num_bytes
        return patches
