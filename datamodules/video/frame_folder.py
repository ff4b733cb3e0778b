"""A folder of numbered frames read as a video: some data sets publish their clips this way.

Frame i (by its number, counted from the lowest one) is shown at i / fps seconds; sampling, clip limits and resizing
are those of any other video.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from datamodules.errors import MediaError
from datamodules.video.decode import resize
from datamodules.video.entry import as_prepared, content_digest
from datamodules.video.spec import VideoInfo

if TYPE_CHECKING:
    from datamodules.types import PreparedVideo
    from datamodules.video.spec import VideoSpec

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_NUMBER = re.compile(r"(\d+)\.\w+$")


def is_frame_folder(path: str | Path) -> bool:
    """Whether `path` is a folder with at least one picture."""
    path = Path(path)
    return path.is_dir() and any(entry.suffix.lower() in SUFFIXES for entry in path.iterdir())


def frame_files(path: str | Path) -> list[Path]:
    """The frames of a folder by their numbers.

    Raises:
        MediaError: there is none, a name has no number, or a number is missing or duplicated: every later frame
            would be shown at a wrong time.
    """
    path = Path(path)
    numbered = []
    for entry in path.iterdir():
        if entry.suffix.lower() in SUFFIXES:
            match = _NUMBER.search(entry.name)
            if match is None:
                raise MediaError(path, f"frame {entry.name} has no number")
            numbered.append((int(match.group(1)), entry))
    if not numbered:
        raise MediaError(path, "holds no frame")
    numbered.sort()
    for expected, (number, entry) in enumerate(numbered, start=numbered[0][0]):
        if number != expected:
            raise MediaError(path, f"frame {expected} is missing or duplicated (found {entry.name})")
    return [entry for _, entry in numbered]


def read_frame_folder(
    path: str | Path, spec: VideoSpec, fps: float, start: float | None = None, end: float | None = None
) -> PreparedVideo:
    """The sampled, resized frames of a folder.

    Args:
        path: the folder.
        spec: sampling and size.
        fps: frames per second with which the folder was written.
        start: start of the used part in seconds.
        end: its end.

    Raises:
        MediaError: the folder or a wanted frame cannot be used; the message names it.
    """
    files = frame_files(path)
    first = _pixels(files[0])
    info = VideoInfo(num_frames=len(files), fps=float(fps), width=first.shape[1], height=first.shape[0])
    plan = spec.plan(info, start, end, path)
    wanted = {index: resize([_pixels(files[index])], plan.height, plan.width) for index in sorted(set(plan.indices))}
    frames = np.concatenate([wanted[index] for index in plan.indices])
    return as_prepared(frames, plan, content_digest(frames, plan), "frames")


def _pixels(path: Path) -> np.ndarray:
    """uint8 [H, W, 3], RGB."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise MediaError(path, f"is not a readable picture ({error})") from error
