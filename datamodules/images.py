"""Load and resize images under their own pixel budget."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from datamodules.common.frames import share
from datamodules.errors import MediaError
from datamodules.types import PreparedImage

if TYPE_CHECKING:
    from datamodules.video.spec import ImageSpec


def load_image(path: str | Path, spec: ImageSpec) -> PreparedImage:
    """Read an image, put transparency on white, resize it (bicubic).

    Raises:
        MediaError: missing, not an image, truncated, or of an extreme aspect ratio.
    """
    try:
        with Image.open(path) as opened:
            image = to_rgb(opened)
        height, width = spec.resized(image.height, image.width)
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise MediaError(path, f"cannot be used as an image ({error})") from error
    image = image.resize((width, height))
    pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    return PreparedImage(
        pixels=share(pixels),
        grid=(1, height // spec.patch_size, width // spec.patch_size),
        digest=hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).hexdigest()[:32],
    )


def image_size(path: str | Path) -> tuple[int, int]:
    """(height, width) from the file's header, without decoding.

    Raises:
        MediaError: missing or not an image.
    """
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, UnidentifiedImageError) as error:
        raise MediaError(path, f"cannot be used as an image ({error})") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB copy; transparent parts of RGBA images become white."""
    if image.mode == "RGBA":
        background = Image.new("RGB", image.size, (255, 255, 255))
        background.paste(image, mask=image.split()[3])
        return background
    return image.convert("RGB")
