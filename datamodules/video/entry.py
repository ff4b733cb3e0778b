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
from typing import TYPE_CHECKING, Any

from datamodules.common.files import write_whole
from datamodules.common.frames import SharedFrames, map_file, share
from datamodules.video.codecs import decode_chunks, encode_chunks, get_codec

if TYPE_CHECKING:
    import numpy as np

    from datamodules.types import PreparedVideo
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
    import numpy as np
    import xxhash

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
    import xxhash

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
    import xxhash

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


def read_entry(path: Path, key: dict | None = None, threads: int = 2) -> tuple[np.ndarray, EntryHeader]:
    """Read a cache file, verify every byte and return (uint8 [T, 3, H, W], header).

    Frames of codec `raw` are a memory map (copy on write).

    Args:
        path: the file.
        key: what the caller expects; None skips the comparison.
        threads: decompression threads.

    Raises:
        EntryError: damaged, truncated, or made for another key.
        FileNotFoundError: there is none.
    """
    import numpy as np
    import xxhash

    header = read_header(path)
    if key is not None and header.key != key:
        raise EntryError(f"{path} was made for {header.key}, wanted {key}")
    if header.codec == "raw":
        offset = header.chunks[0][0]
        frames = map_file(path, offset, header.shape) if _fits(path, header) else None
        if frames is None:
            raise EntryError(f"{path} is truncated")
        flat = np.asarray(frames).reshape(-1)
        _verify([flat[o - offset : o - offset + size] for o, size, _ in header.chunks], header, path)
        return frames, header
    out = np.empty(header.shape, dtype=np.uint8)
    with path.open("rb") as file:
        _ask_for(file.fileno(), header)

        def part(number: int) -> bytes:
            offset, size, checksum = header.chunks[number]
            data = os.pread(file.fileno(), size, offset)
            if len(data) != size or xxhash.xxh3_64_intdigest(data) != checksum:
                raise EntryError(f"{path}: chunk {number} is damaged")
            return data

        decode_chunks(part, len(header.chunks), out, get_codec(header.codec), threads)
    return share(out), header


def _ask_for(descriptor: int, header: EntryHeader) -> None:
    """Let the disk deliver all chunks while the first ones are decompressed."""
    if hasattr(os, "posix_fadvise") and header.chunks:
        start = header.chunks[0][0]
        end = header.chunks[-1][0] + header.chunks[-1][1]
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)


def _fits(path: Path, header: EntryHeader) -> bool:
    offset, size, _ = header.chunks[-1]
    return path.stat().st_size >= offset + size


def _verify(parts: list, header: EntryHeader, path: Path) -> None:
    import xxhash

    for number, (part, (_, size, checksum)) in enumerate(zip(parts, header.chunks, strict=True)):
        if len(part) != size or xxhash.xxh3_64_intdigest(part) != checksum:
            raise EntryError(f"{path}: chunk {number} is damaged")


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
    from datamodules.video.spec import VideoPlan

    return VideoPlan(**{**fields, "indices": tuple(fields["indices"]), "grid": tuple(fields["grid"])})


def as_prepared(frames: np.ndarray, plan: VideoPlan, digest: str, backend: str) -> PreparedVideo:
    """Frames and plan as the object that later stages take."""
    from transformers.video_utils import VideoMetadata

    from datamodules.types import PreparedVideo

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
