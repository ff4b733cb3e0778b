"""The file format of one cached clip: header, checksums, frames. Written atomically, verified when read.

Layout: 8 bytes magic, 4 bytes header length, 8 bytes header checksum, JSON header, zero padding up to a multiple of
4096, payload chunks. The header lists offset, size and xxh3 checksum of every chunk.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from datamodules.common.files import write_whole
from datamodules.common.frames import SharedFrames, map_file, share
from datamodules.types import PreparedVideo
from datamodules.video.codecs import decode_chunks, encode_chunks, get_codec
from datamodules.video.spec import VideoPlan

MAGIC = b"EVR1CCH1"
PAGE = 4096
_PREFIX = struct.Struct("<8sIQ")


class EntryError(ValueError):
    """A cache file that is damaged, or that belongs to something else."""


@dataclass(frozen=True)
class EntryHeader:
    """What a cache file says about itself."""

    key: dict[str, Any]
    """Every field that identifies the content; compared at load."""
    plan: dict[str, Any]
    """The `VideoPlan` the frames were made with."""
    shape: tuple[int, ...]
    codec: str
    chunks: tuple[tuple[int, int, int], ...]
    """(offset from the start of the file, bytes, checksum) of every chunk."""
    producer: dict[str, str]
    """Decoder and library versions, for information."""
    digest: str
    """Hex digest of frames and plan; equal digests mean equal model input."""


def content_digest(frames: np.ndarray, plan: VideoPlan) -> str:
    """Digest of a clip: its pixels and where they lie in time."""
    state = xxhash.xxh3_128()
    state.update(np.ascontiguousarray(frames).data)
    state.update(json.dumps([plan.indices, plan.fps, plan.num_source_frames, frames.shape]).encode())
    return state.hexdigest()


def write_entry(
    path: Path, frames: np.ndarray, plan: VideoPlan, key: dict, codec: str, producer: dict[str, str], threads: int = 2
) -> EntryHeader:
    """Write a cache file so that readers see either nothing or all of it.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind.
    """
    parts = encode_chunks(frames, get_codec(codec), threads)
    digest = content_digest(frames, plan)
    table = [(0, len(part), xxhash.xxh3_64_intdigest(part)) for part in parts]
    fields = {
        "key": key,
        "plan": asdict(plan),
        "shape": list(frames.shape),
        "codec": codec,
        "producer": producer,
        "digest": digest,
    }
    # Offsets are part of the header, whose length is needed for the offsets: reserve room for the digits.
    room = len(json.dumps(fields)) + sum(64 for _ in table) + 64
    start = -(-(_PREFIX.size + room) // PAGE) * PAGE
    offset, placed = start, []
    for _, size, checksum in table:
        placed.append((offset, size, checksum))
        offset += size
    header = json.dumps({**fields, "chunks": placed}).encode()
    prefix = _PREFIX.pack(MAGIC, len(header), xxhash.xxh3_64_intdigest(header))
    body = prefix + header
    write_whole(path, [body, b"\0" * (start - len(body)), *parts])
    return _parse(json.loads(header))


def read_header(path: Path) -> EntryHeader:
    """Read and check the header only.

    Raises:
        EntryError: the file is not an intact cache file.
        FileNotFoundError: there is none.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise EntryError(f"{path} is truncated")
        magic, length, checksum = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise EntryError(f"{path} is not a cache file of this version")
        header = file.read(length)
    if len(header) != length or xxhash.xxh3_64_intdigest(header) != checksum:
        raise EntryError(f"{path}: the header is damaged")
    return _parse(json.loads(header))


def read_entry(path: Path, threads: int = 2) -> tuple[np.ndarray, EntryHeader]:
    """Read a cache file, verify every byte and return (uint8 [T, 3, H, W], header).

    Frames of codec `raw` are a memory map (copy on write).

    Args:
        path: the file.
        threads: decompression threads.

    Raises:
        EntryError: damaged or truncated.
        FileNotFoundError: there is none.
    """
    header = read_header(path)
    if header.codec == "raw":
        start, (last, length, _) = header.chunks[0][0], header.chunks[-1]
        if path.stat().st_size < last + length:
            raise EntryError(f"{path} is truncated")
        frames = map_file(path, start, header.shape)
        flat = np.asarray(frames).reshape(-1)
        for number, (offset, size, checksum) in enumerate(header.chunks):
            data = flat[offset - start : offset - start + size].data
            if len(data) != size or xxhash.xxh3_64_intdigest(data) != checksum:
                raise EntryError(f"{path}: chunk {number} is damaged")
        return frames, header
    out = np.empty(header.shape, dtype=np.uint8)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise") and header.chunks:  # deliver all chunks while the first are decompressed
            start, end = header.chunks[0][0], header.chunks[-1][0] + header.chunks[-1][1]
            os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

        def part(number: int) -> bytes:
            offset, size, checksum = header.chunks[number]
            data = os.pread(file.fileno(), size, offset)
            if len(data) != size or xxhash.xxh3_64_intdigest(data) != checksum:
                raise EntryError(f"{path}: chunk {number} is damaged")
            return data

        decode_chunks(part, len(header.chunks), out, get_codec(header.codec), threads)
    return share(out), header


def _parse(fields: dict) -> EntryHeader:
    return EntryHeader(
        key=fields["key"],
        plan=fields["plan"],
        shape=tuple(fields["shape"]),
        codec=fields["codec"],
        chunks=tuple(tuple(chunk) for chunk in fields["chunks"]),
        producer=fields["producer"],
        digest=fields["digest"],
    )


def plan_from(fields: dict[str, Any]) -> VideoPlan:
    """A plan from its JSON form."""
    return VideoPlan(**{**fields, "indices": tuple(fields["indices"]), "grid": tuple(fields["grid"])})


def as_prepared(frames: np.ndarray, plan: VideoPlan, digest: str, backend: str) -> PreparedVideo:
    """Frames and plan as the object that later stages take."""
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(
        total_num_frames=plan.num_source_frames,
        fps=plan.fps,
        width=plan.width,
        height=plan.height,
        duration=plan.num_source_frames / plan.fps,
        video_backend=backend,
        frames_indices=list(plan.indices),
    )
    if not isinstance(frames, SharedFrames):
        frames = share(frames)
    return PreparedVideo(frames=frames, metadata=metadata, grid=plan.grid, digest=digest)
