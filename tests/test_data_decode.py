"""Decoders: the same frames from each, broken files, and the killable service."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from data_media import damage, levels, noise, numbered_frames, write_video

from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.decode import decode, decode_spec
from datamodules.video.probe import probe, scan
from datamodules.video.service import DecodeService
from datamodules.video.spec import VideoSpec

ROOT = Path(__file__).resolve().parents[1]
SPEC = VideoSpec(min_pixels=1024, max_frames=16)

TORCHCODEC = """
import sys
import numpy as np
from datamodules.video.decode import decode_spec
from datamodules.video.spec import VideoSpec
for path in sys.argv[1:]:
    (a, plan), (b, other) = (decode_spec(path, VideoSpec(max_frames=8, decoder=d)) for d in ("pyav", "torchcodec"))
    assert plan.indices == other.indices
    print(path.rsplit("/")[-1], int(np.abs(a.astype(int) - b).max()))
"""


@pytest.fixture(scope="module")
def ffmpeg_libraries(tmp_path_factory):
    """A folder in which torchcodec finds FFmpeg: the system's where it is installed, else the copy inside PyAV."""
    av = pytest.importorskip("av")
    pytest.importorskip("torchcodec")
    folder = tmp_path_factory.mktemp("ffmpeg")
    for path in (Path(av.__file__).parents[1] / "av.libs").glob("lib[as][vw]*.so.*"):
        name, version = path.name.split("-")[0], path.name.split(".so.")[1].split(".")[0]
        (folder / f"{name}.so.{version}").symlink_to(path)
    return folder


def test_torchcodec_gives_the_same_frames(ffmpeg_libraries, shared_data, tmp_path):
    clips = ["0F7LW.mp4", "JYUqV-7BPWE.mp4", "stvg_8670554760.mp4", "av1_video.mkv", "fractional_fps.avi"]
    paths = [str(shared_data / "videos" / clip) for clip in clips]
    paths.append(str(write_video(tmp_path / "rotated.mp4", numbered_frames(20), rotation=-90)))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(ffmpeg_libraries)}
    run = subprocess.run(
        [sys.executable, "-c", TORCHCODEC, *paths], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    differences = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())
    assert len(differences) == len(paths)
    assert max(int(value) for value in differences.values()) <= 2, differences


def test_torchcodec_without_ffmpeg_says_what_to_do(tmp_path):
    path = write_video(tmp_path / "a.mp4", numbered_frames(8))
    code = f"""
from datamodules.video.decode import decode_spec
from datamodules.video.spec import VideoSpec
print(decode_spec({str(path)!r}, VideoSpec(decoder="torchcodec", min_pixels=1024))[0].shape)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        assert "RuntimeError: decoder=torchcodec cannot be loaded" in run.stderr
        assert "or use decoder=pyav" in run.stderr
    else:
        assert run.stdout == "(4, 3, 64, 96)\n"


def test_decord_agrees_or_refuses(shared_data, tmp_path):
    pytest.importorskip("decord")
    videos = shared_data / "videos"
    for name in ("0F7LW.mp4", "stvg_8670554760.mp4"):
        a, plan = decode_spec(videos / name, VideoSpec(max_frames=8))
        np.testing.assert_array_equal(a, decode(videos / name, plan, "decord"))
    # Its random access returns other frames than its sequential decoding here.
    with pytest.raises(MediaError, match="decord's random access returns a wrong frame"):
        decode_spec(videos / "fractional_fps.avi", VideoSpec(max_frames=8, decoder="decord"))
    with pytest.raises(MediaError, match="decord cannot read it"):
        decode_spec(videos / "av1_video.mkv", VideoSpec(max_frames=8, decoder="decord"))
    rotated = write_video(tmp_path / "rotated.mp4", numbered_frames(8), rotation=-90)
    with pytest.raises(MediaError, match="rotation"):
        decode_spec(rotated, VideoSpec(decoder="decord", min_pixels=1024))


def test_unknown_decoder():
    with pytest.raises(ValueError, match="decoder 'opencv' is unknown"):
        decode("x", None, "opencv")


def test_every_shared_clip_decodes(shared_data):
    expected = {
        "0F7LW.mp4": (187, 6.105, 320, 480),
        "5INX3.mp4": (721, 16.12, 270, 480),
        "JYUqV-7BPWE.mp4": (705, 29.97, 640, 360),
        "av1_video.mkv": (125, 25.0, 640, 360),
        "fractional_fps.avi": (270, 359 / 12, 320, 240),
        "h264_10bits.mp4": (30, 30.0, 200, 200),
        "h265_10bits.mp4": (30, 30.0, 200, 200),
        "stvg_8670554760.mp4": (332, 30000 / 1001, 640, 360),
        "svg_3843663025.mp4": (546, 30000 / 1001, 640, 360),
    }
    for name, (frames, fps, width, height) in expected.items():
        path = shared_data / "videos" / name
        info = probe(path)
        assert (info.num_frames, info.width, info.height) == (frames, width, height), name
        assert info.fps == pytest.approx(fps)
        pixels, plan = decode_spec(path, VideoSpec(max_frames=4, min_frames=2))
        assert pixels.shape == (plan.num_frames, 3, plan.height, plan.width)


def test_random_access_equals_sequential_decoding(tmp_path):
    frames = noise(60)
    for name, options in (("closed.mp4", {"g": "7", "bf": "0"}), ("open.mkv", {"g": "10", "bf": "3"})):
        path = write_video(tmp_path / name, frames, fps=10, **options)
        assert scan(path).seekable
        everything, plan = decode_spec(path, VideoSpec(fps=100, min_pixels=1024))
        assert plan.num_frames == 60
        sparse, few = decode_spec(path, VideoSpec(fps=0.5, min_frames=2, min_pixels=1024), start=1.5)
        np.testing.assert_array_equal(sparse, everything[list(few.indices)])


def broken_files(folder: Path) -> dict[str, Path]:
    good = write_video(folder / "good.mp4", noise(40), fps=10)
    data = good.read_bytes()
    files = {
        "empty": b"",
        "zeros": b"\0" * 5000,
        "text": b"<html>404 not found</html>" * 20,
        "half": data[: len(data) // 2],
        "header only": data[:100],
    }
    out = {}
    for name, content in files.items():
        out[name] = folder / f"{name}.mp4"
        out[name].write_bytes(content)
    out["damaged"] = damage(write_video(folder / "damaged.mp4", noise(40), fps=10))
    streamed = write_video(folder / "streamed.mkv", noise(40), fps=10)
    out["cut stream"] = folder / "cut.mkv"
    out["cut stream"].write_bytes(streamed.read_bytes()[: streamed.stat().st_size // 2 - 7000])
    out["folder"] = folder / "folder.mp4"
    out["folder"].mkdir()
    import wave

    with wave.open(str(folder / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(b"\0" * 1600)
    out["sound only"] = folder / "sound.wav"
    return out


def test_broken_files_are_bad_media_with_a_reason(tmp_path):
    for name, path in broken_files(tmp_path).items():
        if name == "cut stream":
            # What is left of a cut stream is a shorter video; its frames are right.
            assert 2 < probe(path).num_frames < 40
            continue
        with pytest.raises(MediaError) as caught:
            decode_spec(path, SPEC)
        assert caught.value.reason, name
        assert str(path) in str(caught.value), name


def test_damage_is_refused_unless_concealing_is_asked_for(shared_data, tmp_path):
    good = shared_data / "videos" / "0F7LW.mp4"
    truth, plan = decode_spec(good, VideoSpec(max_frames=16))
    refused = 0
    for share in (0.3, 0.45, 0.6, 0.75):
        path = tmp_path / f"{share}.mp4"
        shutil.copy(good, path)
        damage(path, share, size=50)
        guessed = decode(path, plan, conceal_damage=True)
        assert guessed.shape == truth.shape
        try:
            decode(path, plan)
        except MediaError as error:
            refused += "damaged" in error.reason
    assert refused >= 2


@pytest.fixture(scope="module")
def service():
    with_deadline = DecodeService(timeout_s=60)
    yield with_deadline
    with_deadline.close()


def worker_of(service):
    (pid,) = service.pool.pids
    return pid


def test_service_equals_decoding_here(service, tmp_path):
    path = write_video(tmp_path / "a.mp4", numbered_frames(40), fps=10)
    frames, plan = service(path, MediaRef("a.mp4", start=1.0, end=3.0), SPEC)
    here, expected = decode_spec(path, SPEC, 1.0, 3.0)
    assert plan == expected
    np.testing.assert_array_equal(frames, here)
    frames[0] = 0  # private and writable, as torch wants it
    with pytest.raises(MediaError, match="No such file") as caught:
        service(tmp_path / "absent.mp4", MediaRef("absent.mp4"), SPEC)
    assert not caught.value.permanent


def test_a_hanging_decoder_is_killed_at_the_deadline(service, tmp_path):
    path = write_video(tmp_path / "a.mp4", numbered_frames(40), fps=10)
    service(path, MediaRef("a.mp4"), SPEC)
    stuck = worker_of(service)
    os.kill(stuck, signal.SIGSTOP)
    service.timeout_s = 1.0
    try:
        with pytest.raises(MediaError, match="longer than 1 s and was stopped"):
            service(path, MediaRef("a.mp4"), SPEC)
    finally:
        service.timeout_s = 60
    assert not Path(f"/proc/{stuck}").exists()
    assert levels(service(path, MediaRef("a.mp4"), SPEC)[0])[0] == 0  # a new worker goes on


def test_a_crashed_decoder_is_replaced_once(service, tmp_path):
    path = write_video(tmp_path / "a.mp4", numbered_frames(40), fps=10)
    service(path, MediaRef("a.mp4"), SPEC)
    first = worker_of(service)
    os.kill(first, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (first, signal.SIGKILL)).start()  # dies in the middle of the request
    frames, _ = service(path, MediaRef("a.mp4"), SPEC)
    assert worker_of(service) != first
    np.testing.assert_array_equal(frames, decode_spec(path, SPEC)[0])


def test_memory_stays_flat_over_many_decodes(tmp_path):
    """300 decodes here; the slow suite does 1,000."""
    grown = grow_over(tmp_path, 60, 300)
    assert grown < 8e6


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_decodes(tmp_path):
    assert grow_over(tmp_path, 100, 1000) < 10e6


def grow_over(folder: Path, warm_up: int, count: int) -> int:
    paths = [write_video(folder / f"{i}.mp4", noise(16), fps=8) for i in range(3)]
    paths.append(damage(write_video(folder / "bad.mp4", noise(16), fps=8)))

    def once(i: int) -> None:
        try:
            decode_spec(paths[i % len(paths)], VideoSpec(min_pixels=1024, min_frames=2, max_frames=4))
        except MediaError:
            assert i % len(paths) == 3

    for i in range(warm_up):
        once(i)
    before = resident()
    for i in range(count):
        once(i)
    return resident() - before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
