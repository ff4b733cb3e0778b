"""How frames are stored: `raw` (memory-mapped), `lossless` (default) and `jpeg` (small, lossy).

`lossless` removes what natural video predicts about itself before compressing: colour differences against green,
then the difference to the row above, then zstandard. All steps are exact modulo 256.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard
from PIL import Image

CHUNK_FRAMES = 8
"""Frames per independently compressed and checksummed chunk."""


@dataclass(frozen=True)
class Codec:
    """A pair of functions between uint8 [n, 3, H, W] chunks and bytes."""

    name: str
    encode: Callable[[np.ndarray], bytes]
    decode: Callable[[bytes, np.ndarray], None]
    """Fills the given uint8 [n, 3, H, W] array."""
    lossy: bool = False


def get_codec(name: str) -> Codec:
    """Look up a codec.

    Raises:
        ValueError: the name is unknown.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"cache codec {name!r} is unknown; use one of {', '.join(CODECS)}") from None


def encode_chunks(frames: np.ndarray, codec: Codec, threads: int = 2) -> list[bytes]:
    """Encode uint8 [T, 3, H, W] in chunks of `CHUNK_FRAMES`."""
    parts = [frames[i : i + CHUNK_FRAMES] for i in range(0, len(frames), CHUNK_FRAMES)]
    return _map(codec.encode, parts, threads)


def decode_chunks(part: Callable[[int], bytes], count: int, out: np.ndarray, codec: Codec, threads: int = 2) -> None:
    """Decode what `encode_chunks` made into uint8 [T, 3, H, W].

    Args:
        part: gives chunk i; called in the thread that decodes it, so that reading and decoding overlap.
        count: number of chunks.
        out: is filled.
        codec: how the chunks were made.
        threads: chunks decoded at a time.
    """
    targets = [out[i : i + CHUNK_FRAMES] for i in range(0, len(out), CHUNK_FRAMES)]
    if len(targets) != count:
        raise ValueError(f"{count} chunks for {len(targets)} groups of frames")
    _map(lambda i: codec.decode(part(i), targets[i]), range(count), threads)


def _map(function: Callable, items: Sequence, threads: int) -> list:
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _raw_decode(data: bytes, out: np.ndarray) -> None:
    out[...] = np.frombuffer(data, dtype=np.uint8).reshape(out.shape)


def _lossless_encode(chunk: np.ndarray) -> bytes:
    # Rows first, so that undoing the vertical difference adds long contiguous rows.
    rows = np.ascontiguousarray(chunk.transpose(2, 0, 1, 3))
    rows[:, :, 0] -= rows[:, :, 1]
    rows[:, :, 2] -= rows[:, :, 1]
    rows[1:] -= rows[:-1].copy()
    return zstandard.ZstdCompressor(level=1).compress(rows.data)


def _lossless_decode(data: bytes, out: np.ndarray) -> None:
    count, planes, height, width = out.shape
    rows = np.empty((height, count, planes, width), dtype=np.uint8)
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        if reader.readinto(rows.reshape(-1)) != rows.nbytes:
            raise ValueError(f"a compressed chunk holds less than {rows.nbytes} bytes")
    for row in range(1, height):
        np.add(rows[row - 1], rows[row], out=rows[row])
    rows[:, :, 0] += rows[:, :, 1]
    rows[:, :, 2] += rows[:, :, 1]
    out[...] = rows.transpose(1, 2, 0, 3)


def _jpeg_encode(chunk: np.ndarray) -> bytes:
    parts = []
    for frame in chunk:
        buffer = io.BytesIO()
        Image.fromarray(frame.transpose(1, 2, 0)).save(buffer, "JPEG", quality=95)
        parts.append(buffer.getvalue())
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _jpeg_decode(data: bytes, out: np.ndarray) -> None:
    offset = 0
    for target in out:
        (size,) = struct.unpack_from("<I", data, offset)
        offset += 4
        with Image.open(io.BytesIO(data[offset : offset + size])) as image:
            target[...] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        offset += size


CODECS = {
    "raw": Codec("raw", np.ndarray.tobytes, _raw_decode),
    "lossless": Codec("lossless", _lossless_encode, _lossless_decode),
    "jpeg": Codec("jpeg", _jpeg_encode, _jpeg_decode, lossy=True),
}
