"""Small real media files for the data tests: drawn, encoded, and broken on purpose."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np


def numbered_frames(count: int, height: int = 64, width: int = 96) -> np.ndarray:
    """uint8 [count, H, W, 3]; the grey level of frame i is (i * 5) % 250, so that a wrong frame shows."""
    levels = (np.arange(count) * 5 % 250).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


def write_video(
    path: Path,
    frames: np.ndarray,
    fps: float = 10,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    times: list[int] | None = None,
    **options: str,
) -> Path:
    """Encode frames; `times` (in 1/1000 s) makes the rate variable."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(10000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        if codec == "libx264":
            stream.options = {"crf": "4", "preset": "veryfast", **options}
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for i, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels(frames: np.ndarray) -> list[int]:
    """Mean grey level of every frame of uint8 [T, 3, H, W]."""
    return [round(float(value)) for value in frames.mean(axis=(1, 2, 3))]


def noise(count: int, height: int = 64, width: int = 96) -> np.ndarray:
    """uint8 [count, H, W, 3] random pixels: nothing that an encoder could skip."""
    return np.random.default_rng(0).integers(0, 255, (count, height, width, 3), dtype=np.uint8)


def damage(path: Path, share: float = 0.3, size: int = 20_000) -> Path:
    """Overwrite `size` bytes of the coded data, by default enough to hit the frames' own headers."""
    data = bytearray(path.read_bytes())
    start, end = data.find(b"mdat"), data.find(b"moov")
    place = start + int((end - start) * share)
    size = min(size, end - place)
    data[place : place + size] = b"\x5a" * size
    path.write_bytes(bytes(data))
    return path
