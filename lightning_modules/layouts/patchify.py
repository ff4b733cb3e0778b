"""From uint8 pixels of one prompt's media to the patches that the vision tower reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from datamodules.errors import MediaError
from datamodules.prepare import load_processor

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from datamodules.types import PreparedImage, PreparedSample, PreparedVideo
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
    """Rescales, normalises and cuts a sample's media with the Hugging Face processors; images and videos apart.

    A micro-batch holds the images of all its samples first. Resizing and sampling of frames are switched off: they
    happened when the sample was prepared.

    Args:
        processor: the model's.
        device: where rescaling and patching run; None = CPU.
    """

    def __init__(self, processor: ProcessorMixin, device: torch.device | None = None) -> None:
        self.image_processor = processor.image_processor
        self.video_processor = processor.video_processor
        self.device = device

    @classmethod
    def from_path(cls, path: str, device: torch.device | None = None) -> Patchifier:
        """The patchifier of the model at `path`."""
        return cls(load_processor(path), device)

    def __call__(self, sample: PreparedSample) -> Patches:
        """Patches of `sample`'s media.

        Raises:
            MediaError: a grid differs from the prepared one, with the sample's id.
        """
        images = videos = None
        if sample.images:
            pixels = [self._tensor(image.pixels) for image in sample.images]
            out = self.image_processor(images=pixels, do_resize=False, return_tensors="pt")
            images = out["pixel_values"]
            _check_grids(out["image_grid_thw"], sample.uid, sample.images)
        if sample.videos:
            # Set explicitly where it exists: transformers 5.22 turns the cap on. Other families do not know it.
            cap = {"cap_pixels_per_frame": False} if hasattr(self.video_processor, "cap_pixels_per_frame") else {}
            out = self.video_processor(
                videos=[self._tensor(video.frames) for video in sample.videos],
                video_metadata=[dict(video.metadata) for video in sample.videos],
                do_resize=False,
                do_sample_frames=False,
                **cap,
                return_tensors="pt",
            )
            videos = out["pixel_values_videos"]
            _check_grids(out["video_grid_thw"], sample.uid, sample.videos)
        return Patches(
            images=images,
            videos=videos,
            image_grids=tuple(image.grid for image in sample.images),
            video_grids=tuple(video.grid for video in sample.videos),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """uint8 array -> tensor on the device, without a copy where possible."""
        plain = np.asarray(array)
        return torch.from_numpy(plain if plain.flags.writeable else plain.copy()).to(self.device or "cpu")


def _check_grids(grids: torch.Tensor, uid: str, media: Sequence[PreparedImage | PreparedVideo]) -> None:
    for row, medium in zip(grids.tolist(), media, strict=True):
        if tuple(row) != tuple(medium.grid):
            raise MediaError(uid, f"the processor gives grid {tuple(row)}, the sample was prepared with {medium.grid}")


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
