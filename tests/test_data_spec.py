"""The sampling rule against its peer (qwen-vl-utils), against hand-written tables, and against the HF processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_media import levels, numbered_frames, write_video
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from datamodules.errors import MediaError
from datamodules.video.decode import decode_spec
from datamodules.video.probe import probe
from datamodules.video.spec import ImageSpec, VideoInfo, VideoSpec, fit_size


@pytest.fixture(scope="module")
def peer():
    """qwen_vl_utils.vision_process with decord as its reader and its own float rounding untouched."""
    from qwen_vl_utils import vision_process

    patch = pytest.MonkeyPatch()
    patch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")
    yield vision_process
    patch.undo()


def peer_plan(peer, spec: VideoSpec, info: VideoInfo, start, end):
    """(indices, height, width) as the peer computes them, without decoding; None where it raises."""
    element = {"video": "x", "fps": spec.fps, "min_frames": spec.min_frames, "max_frames": spec.max_frames}
    for key in ("min_pixels", "max_pixels", "total_pixels"):
        if getattr(spec, key) is not None:
            element[key] = getattr(spec, key)
    if start is not None:
        element["video_start"] = start
    if end is not None:
        element["video_end"] = end
    seen = {}

    def reader(ele):
        first, last, total = peer.calculate_video_frame_range(ele, info.num_frames, info.fps)
        count = peer.smart_nframes(ele, total_frames=total, video_fps=info.fps)
        seen["indices"] = torch.linspace(first, last, count).round().long().tolist()
        return torch.zeros(1).expand(count, 3, info.height, info.width), {}, info.fps

    def resize(video, size, **_):
        seen["size"] = tuple(size)
        return video[:, :, :1, :1]

    patch = pytest.MonkeyPatch()
    patch.setitem(peer.VIDEO_READER_BACKENDS, "decord", reader)
    patch.setitem(peer.VIDEO_READER_BACKENDS, "torchvision", reader)
    patch.setattr(peer.transforms.functional, "resize", resize)
    try:
        peer.fetch_video(element, image_patch_size=spec.patch_size)
    except (ValueError, AssertionError):
        return None
    finally:
        patch.undo()
    return tuple(seen["indices"]), *seen["size"]


@st.composite
def cases(draw):
    factor = draw(st.sampled_from([28, 32]))
    low = draw(st.one_of(st.none(), st.integers(4 * factor**2, 200 * factor**2)))
    floor = 128 * factor**2 if low is None else low
    max_frames = draw(st.integers(4, 800))
    spec = VideoSpec(
        fps=draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 2.5, 24.0])),
        min_frames=draw(st.integers(1, max_frames)),
        max_frames=max_frames,
        min_pixels=low,
        max_pixels=draw(st.one_of(st.none(), st.integers(floor, 4_000_000))),
        total_pixels=draw(st.one_of(st.none(), st.integers(1_000_000, 200_000_000))),
        patch_size=factor // 2,
    )
    info = VideoInfo(
        num_frames=draw(st.one_of(st.integers(1, 200), st.integers(1, 400_000))),
        fps=draw(
            st.one_of(st.sampled_from([1.0, 15.0, 23.976, 24.0, 25.0, 29.97, 30000 / 1001, 60.0]), st.floats(0.5, 240))
        ),
        width=draw(st.integers(16, 4096)),
        height=draw(st.integers(16, 4096)),
    )
    start = draw(st.one_of(st.none(), st.floats(0, 1.2).map(lambda x: x * info.duration)))
    end = draw(st.one_of(st.none(), st.floats(0, 1.2).map(lambda x: x * info.duration)))
    return spec, info, start, end


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(cases())
def test_rule_equals_peer_on_random_cases(peer, case):
    spec, info, start, end = case
    expected = peer_plan(peer, spec, info, start, end)
    # Where the peer refuses, our answer is in the tables below.
    assume(expected is not None and min(expected[1:]) > 0)
    plan = spec.plan(info, start, end)
    assert (plan.indices, plan.height, plan.width) == expected
    assert plan.grid == (
        len(expected[0]) // 2,
        expected[1] // spec.patch_size,
        expected[2] // spec.patch_size,
    )


def test_rule_equals_peer_on_shared_clips(peer, shared_data):
    options = {"fps": 2.0, "max_frames": 16, "max_pixels": 131_072}
    names = ["0F7LW.mp4", "5INX3.mp4", "JYUqV-7BPWE.mp4", "stvg_8670554760.mp4", "svg_3843663025.mp4"]
    for factor in (32, 28):
        for name in names if factor == 32 else names[:1]:
            path = shared_data / "videos" / name
            (video, metadata) = peer.fetch_video(
                {"video": str(path), **options}, image_patch_size=factor // 2, return_video_metadata=True
            )
            frames, plan = decode_spec(path, VideoSpec(**options, patch_size=factor // 2))
            assert list(plan.indices) == list(metadata["frames_indices"]), name
            assert plan.fps == metadata["fps"]
            # Same decoder arithmetic, same resize: not one level of difference.
            np.testing.assert_array_equal(frames, video.numpy().astype(np.uint8))


@pytest.mark.parametrize(
    ("num_frames", "fps", "start", "end", "expected"),
    [
        (1, 30.0, None, None, (0, 0)),  # one frame fills its patch twice
        (2, 30.0, None, None, (0, 1)),
        (3, 30.0, None, None, (0, 2)),
        (6, 30.0, None, None, (0, 2, 3, 5)),  # 0.2 s: min_frames
        (100, 10.0, 3.0, 3.0, (30, 30)),  # an empty part is the frame at its time
        (100, 10.0, 3.01, 3.09, (30, 30)),  # a part between two frames: the one nearest to its middle
        (100, 10.0, 99.0, 120.0, (99, 99)),  # behind the end
        (100, 10.0, None, 0.05, (0, 0)),
        (100, 10.0, 2.0, 4.0, (20, 27, 33, 40)),  # 21 frames -> 4.2 -> 4
    ],
)
def test_indices_where_the_peer_has_no_answer(num_frames, fps, start, end, expected):
    info = VideoInfo(num_frames, fps, 64, 64)
    assert VideoSpec().indices(info, start, end) == expected


def test_three_hours_stay_within_the_frame_limit():
    info = VideoInfo(num_frames=323_676, fps=30000 / 1001, width=1920, height=1080)
    plan = VideoSpec(max_frames=128, max_pixels=262_144).plan(info)
    assert plan.num_frames == 128
    assert plan.indices[:2] == (0, 2549)
    assert plan.indices[-1] == 323_675
    # 1920x1080 -> beta = sqrt(2073600 / 262144) = 2.8125 -> 682.7 x 384 -> 672 x 384
    assert (plan.height, plan.width) == (384, 672)
    assert plan.num_tokens == 64 * 12 * 21


def test_timestamps_are_the_middle_of_each_temporal_patch():
    plan = VideoSpec(min_pixels=1024).plan(VideoInfo(30, 7.5, 64, 64))
    assert plan.indices == (0, 4, 8, 12, 17, 21, 25, 29)
    assert plan.timestamps == pytest.approx([4 / 15, 20 / 15, 38 / 15, 54 / 15])


def test_extreme_aspect_ratio_is_bad_media():
    with pytest.raises(MediaError, match="aspect ratio 250"):
        VideoSpec().plan(VideoInfo(10, 10.0, 4000, 16))


def test_a_side_never_vanishes():
    # beta = sqrt(32 * 6000 / 65536) = 1.7116: floor(32 / beta / 32) would be 0, floor(6000 / beta / 32) is 109
    assert fit_size(32, 6000, 32, 1024, 65_536) == (32, 3488)


def test_spec_rejects_contradictions():
    with pytest.raises(ValueError, match="less than min_pixels"):
        VideoSpec(max_pixels=10_000)
    with pytest.raises(ValueError, match="min_frames=8"):
        VideoSpec(min_frames=8, max_frames=4)
    with pytest.raises(ValueError, match="image max_pixels"):
        ImageSpec(min_pixels=5000, max_pixels=4096)


def test_fingerprint_covers_every_field():
    base = VideoSpec()
    changes = {
        "fps": 1.0, "min_frames": 2, "max_frames": 8, "min_pixels": 2048, "max_pixels": 262_144, "total_pixels": 1e6,
        "patch_size": 14, "merge_size": 4, "temporal_patch": 4, "pin_decoder": True, "conceal_damage": True,
    }  # fmt: skip
    digests = {VideoSpec(**{name: value}).digest for name, value in changes.items()}
    assert len(digests | {base.digest}) == len(changes) + 1
    assert VideoSpec(decoder="decord").digest == base.digest
    assert VideoSpec(decoder="decord", pin_decoder=True).digest != VideoSpec(pin_decoder=True).digest


@pytest.mark.parametrize(
    ("name", "kwargs", "count", "expected_levels"),
    [
        ("plain.mp4", {"fps": 10}, 40, [0, 30, 55, 85, 110, 140, 165, 195]),
        ("b_frames.mp4", {"fps": 10, "bf": "3", "g": "12"}, 40, [0, 30, 55, 85, 110, 140, 165, 195]),
        ("open_gop.mkv", {"fps": 10, "bf": "3", "g": "5"}, 40, [0, 30, 55, 85, 110, 140, 165, 195]),
        ("counted.avi", {"fps": 10, "codec": "mjpeg", "pix_fmt": "yuvj420p"}, 40, [0, 30, 55, 85, 110, 140, 165, 195]),
        ("one.mp4", {"fps": 10}, 1, [0, 0]),
        ("short.mp4", {"fps": 30}, 6, [0, 10, 15, 25]),
        ("ten_bit.mp4", {"fps": 10, "pix_fmt": "yuv420p10le"}, 40, [0, 30, 55, 85, 110, 140, 165, 195]),
        ("film.mp4", {"fps": 24000 / 1001}, 48, [0, 80, 155, 235]),
    ],
)
def test_decoded_frames_are_the_planned_ones(tmp_path, name, kwargs, count, expected_levels):
    path = write_video(tmp_path / name, numbered_frames(count), **kwargs)
    frames, plan = decode_spec(path, VideoSpec(min_pixels=1024))
    assert [i * 5 % 250 for i in plan.indices] == expected_levels
    np.testing.assert_allclose(levels(frames), expected_levels, atol=3)
    assert frames.shape[1:] == (3, 64, 96)


def test_variable_frame_rate_uses_the_average(tmp_path):
    times = [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1900, 2900, 3900]
    path = write_video(tmp_path / "vfr.mkv", numbered_frames(13), fps=10, times=times)
    info = probe(path)
    assert info.num_frames == 13
    frames, plan = decode_spec(path, VideoSpec(min_pixels=1024, min_frames=2))
    np.testing.assert_allclose(levels(frames), [i * 5 for i in plan.indices], atol=3)


def test_rotation_flag_turns_the_picture(tmp_path):
    image = np.zeros((64, 96, 3), np.uint8)
    image[:32, :48] = 255  # white in the upper left
    path = write_video(tmp_path / "phone.mp4", np.stack([image] * 4), rotation=-90)
    info = probe(path)
    assert (info.height, info.width, info.rotation) == (96, 64, 270)
    frames, _ = decode_spec(path, VideoSpec(min_pixels=1024))
    corners = frames[0, 0, [0, 0, -1, -1], [0, -1, 0, -1]]
    np.testing.assert_allclose(corners, [0, 255, 0, 0], atol=8)  # clockwise: white is upper right


def test_odd_sizes_and_clips(tmp_path):
    path = write_video(tmp_path / "odd.mkv", numbered_frames(40, 63, 95), fps=10, pix_fmt="yuv444p")
    frames, plan = decode_spec(path, VideoSpec(min_pixels=1024), start=1.0, end=3.0)
    assert plan.indices == (10, 17, 23, 30)
    assert plan.num_source_frames == 21
    np.testing.assert_allclose(levels(frames), [50, 85, 115, 150], atol=3)


def test_header_without_duration(tmp_path):
    path = write_video(tmp_path / "live.mkv", numbered_frames(40), fps=10)
    data = path.read_bytes()
    position = data.find(b"\x44\x89")  # Matroska's Duration element
    assert position > 0
    path.write_bytes(
        data[:position] + b"\xec" + bytes([0x80 | 9]) + data[position + 2 : position + 11] + data[position + 11 :]
    )
    import av

    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert probe(path).num_frames == 40
