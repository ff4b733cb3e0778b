"""What MP4 and MOV headers say about a video, exactly and without decoding; None where they do not say enough.

Most training videos are MP4 files, whose sample table lists every frame. Reading it instead of the packets spares
reading the whole file, and the header's display matrix spares decoding a frame. Anything unusual (fragments, a cut
file, a rotation, a codec that may carry its own orientation) is left to `probe`, which goes through the packets.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO

import av

from datamodules.errors import MediaError
from datamodules.video.spec import VideoInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.container import InputContainer

IDENTITY = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
"""A display matrix that changes nothing, as `mvhd` and `tkhd` store it."""
MATRIX_OFFSET = {b"mvhd": (36, 48), b"tkhd": (40, 52)}
"""Where the matrix lies in a version 0 and a version 1 box, from the start of its content."""
ORIENTATION = 47
"""The supplemental message (SEI) of H.264 and H.265 that turns the picture."""
NAL_CODECS = {"h264": (4, 0x1F, (6,), 1), "hevc": (21, 0x7E, (78, 80), 2)}
"""Codec -> (byte of the extra data with the length size, mask of the unit type, masked SEI types, header bytes)."""
PLAIN_CODECS = ("mpeg4", "vp8", "vp9", "av1", "libdav1d", "libaom-av1")
"""Codecs without an orientation of their own."""


def header_info(path: str) -> VideoInfo | None:
    """`VideoInfo` of an unrotated, complete MP4 or MOV file; None when only its packets can tell."""
    try:
        with open(path, "rb") as file:
            tracks = upright_tracks(file)
            size = file.seek(0, 2)
        if not tracks:
            return None
        with av.open(path) as container:
            stream = video_stream(container, path)
            if stream.id not in tracks or not stream.average_rate or not stream.frames:
                return None
            kept = [entry for entry in stream.index_entries if entry.size and not entry.is_discard]
            if not kept or any(entry.pos + entry.size > size for entry in kept):
                return None
            codec = stream.codec_context
            if not (codec.width and codec.height) or _may_turn(codec, next(container.demux(stream))):
                return None
            return VideoInfo(len(kept), float(stream.average_rate), codec.width, codec.height)
    except (av.error.FFmpegError, OSError, StopIteration, ValueError, IndexError, struct.error):
        # Whatever is wrong with the file is named by the pass over its packets.
        return None


def video_stream(container: InputContainer, path: object) -> av.VideoStream:
    """The container's main video stream (cover pictures do not count)."""
    stream = container.streams.best("video")
    if not isinstance(stream, av.VideoStream):
        raise MediaError(path, "holds no video stream")
    return stream


def upright_tracks(file: BinaryIO) -> set[int]:
    """Ids of the tracks that are shown as stored; empty for fragmented files and other formats."""
    kind = file.read(8)[4:]
    if kind not in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return set()
    end = file.seek(0, 2)
    found: set[int] = set()
    for outer, start, stop in _boxes(file, 0, end):
        if outer == b"moof":
            return set()
        if outer != b"moov":
            continue
        for inner, inner_start, inner_stop in _boxes(file, start, stop):
            if inner == b"mvex" or (inner == b"mvhd" and not _identity(file, inner, inner_start)):
                return set()
            if inner == b"trak":
                for leaf, leaf_start, _ in _boxes(file, inner_start, inner_stop):
                    if leaf == b"tkhd" and _identity(file, leaf, leaf_start):
                        file.seek(leaf_start)
                        file.seek(leaf_start + (20 if file.read(1)[0] else 12))
                        found.add(struct.unpack(">I", file.read(4))[0])
    return found


def _boxes(file: BinaryIO, position: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start of content, end) of the boxes between two positions."""
    while position + 8 <= end:
        file.seek(position)
        size, kind = struct.unpack(">I4s", file.read(8))
        head = 8
        if size == 1:
            (size,), head = struct.unpack(">Q", file.read(8)), 16
        elif size == 0:
            size = end - position
        if size < head:
            return
        yield kind, position + head, min(position + size, end)
        position += size


def _identity(file: BinaryIO, kind: bytes, start: int) -> bool:
    file.seek(start)
    version = file.read(1)[0]
    file.seek(start + MATRIX_OFFSET[kind][1 if version else 0])
    return file.read(len(IDENTITY)) == IDENTITY


def _may_turn(codec: av.VideoCodecContext, packet: av.Packet) -> bool:
    """Whether the coded stream itself may turn the picture."""
    if codec.name in PLAIN_CODECS:
        return False
    if codec.name not in NAL_CODECS:
        return True
    byte, mask, messages, head = NAL_CODECS[codec.name]
    extra, data = bytes(codec.extradata or b""), bytes(packet)
    if not extra or extra[0] != 1:
        return True
    width, position = (extra[byte] & 3) + 1, 0
    while position + width < len(data):
        size = int.from_bytes(data[position : position + width], "big")
        position += width
        if size and data[position] & mask in messages and _has_orientation(data[position + head : position + size]):
            return True
        position += size
    return False


def _has_orientation(unit: bytes) -> bool:
    """Whether one of the messages of an SEI unit is a display orientation."""
    unit = unit.replace(b"\0\0\3", b"\0\0")
    position = 0
    while position + 2 <= len(unit):
        values = []
        for _ in range(2):  # type and size are written alike: 255 means "add the next byte"
            value = 0
            while unit[position] == 255:
                value, position = value + 255, position + 1
            values.append(value + unit[position])
            position += 1
        if values[0] == ORIENTATION:
            return True
        position += values[1]
    return False
