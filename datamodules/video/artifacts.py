"""Read clips that EasyVideoR1's offline tool has written (`.pt`: float frames, metadata, sampled rate).

Only tensors and plain values are unpickled. The frames are integers stored as floats, so uint8 keeps them exactly.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.errors import MediaError
from datamodules.video.entry import as_prepared, content_digest
from datamodules.video.spec import VideoInfo, VideoPlan

if TYPE_CHECKING:
    from datamodules.types import PreparedVideo
    from datamodules.video.spec import VideoSpec

SUFFIX = ".pt"


def artifact_plan(path: str | Path, spec: VideoSpec) -> VideoPlan:
    """The plan of an artefact, from its metadata and shapes; the frames are not read.

    Raises:
        MediaError: damaged, or made with another sampling than `spec`.
    """
    return _checked(path, _load(path), spec)


def read_artifact(path: str | Path, spec: VideoSpec) -> PreparedVideo:
    """Load an artefact.

    Raises:
        MediaError: damaged, made with another sampling than `spec`, or its frames are not 8-bit values.
    """
    import torch

    data = _load(path)
    plan = _checked(path, data, spec)
    frames = data["frames"]
    whole = frames.to(torch.uint8)
    if frames.dtype != torch.uint8 and not torch.equal(whole.to(frames.dtype), frames):
        raise MediaError(path, "its frames are not integers from 0 to 255; cache the video again instead")
    array = whole.contiguous().numpy()
    return as_prepared(array, plan, content_digest(array, plan), str(data["metadata"].get("video_backend", "")))


def _load(path: str | Path) -> dict[str, Any]:
    import torch

    try:
        data = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise MediaError(path, "cannot be read (No such file or directory)", permanent=False) from error
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise MediaError(path, f"is not a readable .pt artefact ({str(error).splitlines()[0]})") from error
    if not isinstance(data, dict) or not {"frames", "metadata"} <= set(data) or data["frames"].ndim != 4:
        raise MediaError(path, "is not a video artefact: expected frames [T, 3, H, W] and metadata")
    return data


def _checked(path: str | Path, data: dict[str, Any], spec: VideoSpec) -> VideoPlan:
    metadata, (count, _, height, width) = data["metadata"], data["frames"].shape
    try:
        indices = tuple(int(index) for index in metadata["frames_indices"])
        fps, total = float(metadata["fps"]), int(metadata["total_num_frames"])
    except (KeyError, TypeError, ValueError) as error:
        raise MediaError(path, f"its metadata lack {error}") from error
    wanted = spec.indices(VideoInfo(total, fps, width, height))
    if indices != wanted or count != len(indices):
        raise MediaError(
            path, f"holds {count} frames sampled differently from fps={spec.fps}, max_frames={spec.max_frames}"
        )
    too_large = spec.max_pixels is not None and height * width > spec.max_pixels
    if height % spec.factor or width % spec.factor or too_large:
        raise MediaError(
            path, f"its frames are {height}x{width}: not multiples of {spec.factor} within {spec.max_pixels} pixels"
        )
    grid = (count // spec.temporal_patch, height // spec.patch_size, width // spec.patch_size)
    return VideoPlan(indices, fps, total, height, width, grid, spec.merge_size, spec.temporal_patch)
