"""What headers say without decoding equals what the packets and a decoded frame say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_media import levels, noise, numbered_frames, write_video

from datamodules.errors import MediaError
from datamodules.video.decode import decode_spec
from datamodules.video.headers import header_info
from datamodules.video.probe import probe, scan
from datamodules.video.spec import VideoSpec

TIMES = [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1900, 2900, 3900]


def remux(source: Path, target: Path, shift: int = 0, bitstream: str | None = None, **options: str) -> Path:
    """Copy the packets into a new file; `shift` frames lie before time zero and are hidden by an edit list."""
    import av

    with av.open(str(source)) as reader, av.open(str(target), "w", options=options) as writer:
        stream = reader.streams.video[0]
        output = writer.add_stream_from_template(stream)
        step = int(1 / (stream.average_rate * stream.time_base))
        rewrite = None if bitstream is None else av.bitstream.BitStreamFilterContext(bitstream, stream, output)
        for packet in reader.demux(stream):
            if packet.dts is None:
                continue
            packet.pts, packet.dts = packet.pts - shift * step, packet.dts - shift * step
            for part in [packet] if rewrite is None else rewrite.filter(packet):
                part.stream = output
                writer.mux(part)
    return target


def patched(path: Path, box: bytes, offset: int, value: bytes) -> Path:
    data = bytearray(path.read_bytes())
    place = data.find(box) + offset
    data[place : place + len(value)] = value
    path.write_bytes(data)
    return path


def mp4_files(folder: Path) -> dict[str, tuple[Path, bool]]:
    """Name -> (file, whether its header is enough)."""
    frames = numbered_frames(40)
    plain = write_video(folder / "plain.mp4", frames)
    files = {
        "plain": (plain, True),
        "b frames": (write_video(folder / "b.mp4", frames, bf="3", g="12"), True),
        "one frame": (write_video(folder / "one.mp4", frames[:1]), True),
        "0.2 s": (write_video(folder / "short.mp4", frames[:6], fps=30), True),
        "ten bit": (write_video(folder / "ten.mp4", frames, pix_fmt="yuv420p10le"), True),
        "non-integer rate": (write_video(folder / "film.mp4", frames, fps=24000 / 1001), True),
        "variable rate": (write_video(folder / "vfr.mp4", frames[:13], times=TIMES), True),
        "odd size": (write_video(folder / "odd.mov", numbered_frames(9, 63, 95), pix_fmt="yuv444p"), True),
        "mpeg4": (write_video(folder / "mpeg4.mp4", frames, codec="mpeg4"), True),
        "front header": (remux(plain, folder / "front.mp4", movflags="faststart"), True),
        "edit list": (remux(plain, folder / "edit.mp4", shift=7, avoid_negative_ts="disabled"), True),
        "wrong size in the header": (
            patched(write_video(folder / "lie.mp4", frames), b"avc1", 28, b"\0\x10\0\x10"),
            True,
        ),
        "rotated": (write_video(folder / "rotated.mp4", frames, rotation=-90), False),
        "mirrored": (patched(write_video(folder / "mirror.mp4", frames), b"tkhd", 44, b"\xff\xff\0\0"), False),
        "fragmented": (remux(plain, folder / "fragments.mp4", movflags="frag_keyframe+empty_moov"), False),
        "no duration": (write_video(folder / "live.mkv", frames), False),
        "avi": (write_video(folder / "mjpeg.avi", frames, codec="mjpeg", pix_fmt="yuvj420p"), False),
    }
    # A turn that only the coded stream knows of.
    turn = "h264_metadata=display_orientation=insert:rotate=90"
    files["turned in the stream"] = (remux(plain, folder / "turned.mp4", bitstream=turn), False)
    return files


def test_headers_equal_packets(tmp_path):
    for name, (path, enough) in mp4_files(tmp_path).items():
        info = header_info(str(path))
        assert (info is not None) == enough, name
        assert probe(path) == scan(path).info, name
        frames, plan = decode_spec(path, VideoSpec(min_pixels=1024))
        assert len(frames) == plan.num_frames, name
    assert probe(tmp_path / "turned.mp4").rotation in (90, 270)
    assert probe(tmp_path / "edit.mp4").num_frames == 33
    assert (probe(tmp_path / "lie.mp4").width, probe(tmp_path / "lie.mp4").height) == (96, 64)


def test_headers_equal_packets_on_shared_clips(shared_data):
    by_header = 0
    for path in sorted((shared_data / "videos").iterdir()):
        info = header_info(str(path))
        by_header += info is not None
        assert info in (None, scan(path).info), path.name
    assert by_header == 7  # all MP4 files


def test_a_cut_file_is_not_believed(tmp_path):
    path = write_video(tmp_path / "whole.mp4", noise(40))
    front = remux(path, tmp_path / "front.mp4", movflags="faststart")
    assert header_info(str(front)).num_frames == 40
    front.write_bytes(front.read_bytes()[: front.stat().st_size * 2 // 3])
    assert header_info(str(front)) is None
    assert probe(front) == scan(front).info
    assert probe(front).num_frames < 40


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 64, b"\0\0\0\x08ftyp", b"\0\0\0\x10ftypmp42\0\0\0\0\0\0\0\x08moov"],
    ids=["empty", "zeros", "type only", "empty header"],
)
def test_stumps_are_left_to_the_packets(tmp_path, content):
    path = tmp_path / "stump.mp4"
    path.write_bytes(content)
    assert header_info(str(path)) is None
    with pytest.raises(MediaError):
        probe(path)


def test_a_size_that_changes_on_the_way_is_scaled(tmp_path):
    small, large = (write_video(tmp_path / f"{n}.h264", numbered_frames(8, n, 96), bf="0") for n in (64, 96))
    path = tmp_path / "both.h264"
    path.write_bytes(small.read_bytes() + large.read_bytes())
    frames, plan = decode_spec(path, VideoSpec(min_pixels=1024, fps=100))
    assert frames.shape == (16, 3, 64, 96) == (plan.num_frames, 3, plan.height, plan.width)
    np.testing.assert_allclose(levels(frames), [i % 8 * 5 for i in range(16)], atol=3)


def test_random_header_damage_never_changes_the_answer_silently(tmp_path):
    path = write_video(tmp_path / "a.mp4", noise(12))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    start = data.find(b"moov")
    for i in range(60):
        broken = bytearray(data)
        broken[rng.integers(start, len(data))] ^= 1 << rng.integers(8)
        other = tmp_path / f"{i}.mp4"
        other.write_bytes(broken)
        info = header_info(str(other))
        if info is not None:
            assert info == scan(other).info
