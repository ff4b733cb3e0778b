"""The clip cache: bit-exact codecs, and never a wrong frame whatever happens to the files."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_media import numbered_frames, write_video

from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache
from datamodules.video.codecs import CODECS, decode_chunks, encode_chunks
from datamodules.video.decode import decode_spec
from datamodules.video.entry import EntryError, read_entry
from datamodules.video.maintenance import clear_stale, evict
from datamodules.video.spec import VideoSpec

ROOT = Path(__file__).resolve().parents[1]
SPEC = VideoSpec(min_pixels=1024, max_frames=16)
REF = MediaRef("clip.mp4")


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    rng = np.random.default_rng(0)
    frames = numbered_frames(40)
    frames[:, 20:40, 30:60] = rng.integers(0, 255, size=(40, 20, 30, 3), dtype=np.uint8)
    write_video(folder / "clip.mp4", frames)
    return folder


@pytest.fixture
def truth(media):
    return decode_spec(media / "clip.mp4", SPEC)[0]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_lossless_codecs_are_bit_exact(codec):
    rng = np.random.default_rng(1)
    for shape in ((1, 3, 32, 32), (19, 3, 64, 96)):
        frames = rng.integers(0, 256, size=shape, dtype=np.uint8)
        out = np.empty_like(frames)
        parts = encode_chunks(frames, CODECS[codec])
        decode_chunks(parts.__getitem__, len(parts), out, CODECS[codec])
        np.testing.assert_array_equal(out, frames)


def test_jpeg_is_marked_lossy_and_close(media, truth, tmp_path):
    cache = VideoCache(tmp_path / "cache", media, codec="jpeg")
    first, second = cache.load(REF, SPEC), cache.load(REF, SPEC)
    assert CODECS["jpeg"].lossy
    # The first pass sees the same pixels as all later ones.
    np.testing.assert_array_equal(first.frames, second.frames)
    assert first.digest == second.digest
    assert np.abs(first.frames.astype(int) - truth).mean() < 3


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_load_builds_once_then_hits(media, truth, tmp_path, codec):
    cache = VideoCache(tmp_path / "cache", media, codec=codec)
    built, hit = cache.load(REF, SPEC), cache.load(REF, SPEC)
    for video in (built, hit):
        np.testing.assert_array_equal(video.frames, truth)
        assert video.metadata.frames_indices == [0, 6, 11, 17, 22, 28, 33, 39]
        assert video.metadata.fps == 10.0
        assert video.metadata.total_num_frames == 40
        assert video.grid == (4, 4, 6)
    assert built.digest == hit.digest
    assert (cache.counters["built"], cache.counters["hit"]) == (1, 1)


def test_every_spec_field_and_part_has_its_own_entry(media, tmp_path):
    cache = VideoCache(tmp_path / "cache", media)
    specs = [SPEC, VideoSpec(min_pixels=1024, max_frames=8, fps=1), VideoSpec(min_pixels=2048, max_frames=16)]
    refs = [REF, MediaRef("clip.mp4", start=1.0), MediaRef("clip.mp4", start=1.0, end=3.0)]
    assert len({cache.entry_path(ref, spec) for ref in refs for spec in specs}) == 9


def test_copied_media_and_cache_match_on_another_path(media, truth, tmp_path):
    VideoCache(tmp_path / "cache", media).load(REF, SPEC)
    shutil.copytree(media, tmp_path / "node2" / "media")
    shutil.copytree(tmp_path / "cache", tmp_path / "node2" / "cache")
    os.utime(tmp_path / "node2" / "media" / "clip.mp4", (1, 1))
    moved = VideoCache(tmp_path / "node2" / "cache", tmp_path / "node2" / "media")
    np.testing.assert_array_equal(moved.load(REF, SPEC).frames, truth)
    assert moved.counters["hit"] == 1


def test_changed_source_is_decoded_again(media, tmp_path):
    cache = VideoCache(tmp_path / "cache", media)
    old = cache.load(REF, SPEC)
    write_video(media / "clip.mp4", numbered_frames(40)[::-1])
    new = cache.load(REF, SPEC)
    assert cache.counters["rebuilt"] == 1
    assert new.digest != old.digest
    np.testing.assert_array_equal(new.frames, decode_spec(media / "clip.mp4", SPEC)[0])


@pytest.mark.parametrize("codec", ["raw", "lossless", "jpeg"])
def test_a_flipped_byte_anywhere_is_noticed(media, tmp_path, codec):
    cache = VideoCache(tmp_path / "cache", media, codec=codec)
    expected = cache.load(REF, SPEC).frames.copy()
    path = cache.entry_path(REF, SPEC)
    good = path.read_bytes()
    _, header = read_entry(path)
    payload = header.chunks[0][0]
    end_of_header = 20 + int.from_bytes(good[8:12], "little")
    places = [0, 9, 13, 25, end_of_header - 1, payload, payload + 100, len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(EntryError):
            read_entry(path)
        np.testing.assert_array_equal(cache.load(REF, SPEC).frames, expected)
    for size in (0, 5, 30, payload, len(good) - 1):
        path.write_bytes(good[:size])
        np.testing.assert_array_equal(cache.load(REF, SPEC).frames, expected)
    assert cache.counters["built"] == 1 + len(places) + 5


def test_an_entry_under_the_wrong_name_is_not_used(media, truth, tmp_path):
    cache = VideoCache(tmp_path / "cache", media)
    other = VideoSpec(min_pixels=1024, max_frames=4)
    cache.load(REF, other)
    wrong = cache.entry_path(REF, SPEC)
    wrong.parent.mkdir(exist_ok=True, parents=True)
    shutil.copy(cache.entry_path(REF, other), wrong)
    np.testing.assert_array_equal(cache.load(REF, SPEC).frames, truth)


WRITER = """
import sys
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache
from datamodules.video.decode import decode_spec
from datamodules.video.spec import VideoSpec
media, folder, codec = sys.argv[1:4]
cache = VideoCache(folder, media, codec=codec)
spec = VideoSpec(min_pixels=1024, max_frames=16)
ref = MediaRef("clip.mp4")
frames, plan = decode_spec(cache.source(ref), spec)
print("ready", flush=True)
for _ in range(int(sys.argv[4])):
    cache.put(ref, spec, frames, plan)
"""


def start_writer(media, folder, rounds, codec="lossless", **options):
    command = [sys.executable, "-c", WRITER, str(media), str(folder), codec, str(rounds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout.readline() == "ready\n"
    return process


def test_kill_at_any_moment_leaves_all_or_nothing(media, truth, tmp_path):
    folder = tmp_path / "cache"
    process = start_writer(media, folder, 10**6)
    reader = VideoCache(folder, media)
    path = reader.entry_path(REF, SPEC)
    rng = np.random.default_rng(0)
    for _ in range(12):
        # Stopping freezes the writer in the middle of whatever it does: what a kill would leave behind.
        time.sleep(float(rng.uniform(0.001, 0.02)))
        os.kill(process.pid, signal.SIGSTOP)
        if path.exists():
            np.testing.assert_array_equal(read_entry(path)[0], truth)
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()
    np.testing.assert_array_equal(reader.load(REF, SPEC).frames, truth)
    leftovers = list(folder.glob("*/.*.tmp"))
    assert clear_stale(folder, older_than=-1) == len(leftovers)
    assert not list(folder.glob("*/.*.tmp"))


def test_two_writers_of_one_entry(media, truth, tmp_path):
    folder = tmp_path / "cache"
    writers = [start_writer(media, folder, 25) for _ in range(2)]
    reader = VideoCache(folder, media)
    while any(writer.poll() is None for writer in writers):
        video = reader.get(REF, SPEC)
        if video is not None:
            np.testing.assert_array_equal(video.frames, truth)
    assert [writer.wait() for writer in writers] == [0, 0]


def test_full_disk_goes_on_from_memory(media, truth, tmp_path, caplog):
    cache = VideoCache(tmp_path / "cache", media, codec="raw")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        video = cache.load(REF, SPEC)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    np.testing.assert_array_equal(video.frames, truth)
    assert cache.counters["not_stored"] == 1
    assert "cannot store clip.mp4" in caplog.text
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_source_modes(media, truth, tmp_path):
    only = VideoCache(tmp_path / "cache", media, source_mode="cache_only")
    with pytest.raises(MediaError, match="not in the cache"):
        only.load(REF, SPEC)
    decode = VideoCache(tmp_path / "cache", media, source_mode="decode")
    np.testing.assert_array_equal(decode.load(REF, SPEC).frames, truth)
    assert not (tmp_path / "cache").exists()
    VideoCache(tmp_path / "cache", media).load(REF, SPEC)
    (media / "clip.mp4").unlink()  # a node that has only the cache
    np.testing.assert_array_equal(only.load(REF, SPEC).frames, truth)
    with pytest.raises(ValueError, match="needs cache_dir"):
        VideoCache(None, media, source_mode="cache_only")


def test_least_recently_used_clips_are_evicted(media, tmp_path):
    cache = VideoCache(tmp_path / "cache", media)
    specs = [VideoSpec(min_pixels=1024, max_frames=n) for n in (4, 6, 8)]
    for age, spec in zip((300, 200, 100), specs, strict=True):
        cache.load(REF, spec)
        then = time.time() - age
        os.utime(cache.entry_path(REF, spec), (then, then))
    cache.load(REF, specs[0])  # now the most recently used
    sizes = [cache.entry_path(REF, spec).stat().st_size for spec in specs]
    removed = evict(tmp_path / "cache", sizes[0] + sizes[2], protect_seconds=10)
    assert removed == [cache.entry_path(REF, specs[1])]
    assert evict(tmp_path / "cache", 0, protect_seconds=50) == [cache.entry_path(REF, specs[2])]


def test_the_size_limit_holds_while_filling(media, tmp_path, monkeypatch):
    from datamodules.video import maintenance

    monkeypatch.setattr(maintenance.evict, "__defaults__", (0.0,))  # nothing counts as in use
    limit = 60_000
    cache = VideoCache(tmp_path / "cache", media, max_bytes=limit)
    for i in range(12):
        cache.load(MediaRef("clip.mp4", start=i * 0.1), SPEC)
        newest = cache.entry_path(MediaRef("clip.mp4", start=i * 0.1), SPEC)
        assert newest.exists()
        total = sum(state.st_size for _, state in maintenance.entries(tmp_path / "cache"))
        assert total <= limit + newest.stat().st_size


def test_staging_copies_to_the_local_disk_and_follows_changes(media, truth, tmp_path):
    cache = VideoCache(tmp_path / "slow", media, stage_dir=tmp_path / "local")
    cache.load(REF, SPEC)
    np.testing.assert_array_equal(cache.load(REF, SPEC).frames, truth)
    (local,) = (tmp_path / "local").glob("*/*.clip")
    copied = local.stat().st_ino
    cache.load(REF, SPEC)
    assert local.stat().st_ino == copied  # not copied again
    local.write_bytes(local.read_bytes()[:-1] + b"x")  # damaged copy
    np.testing.assert_array_equal(cache.load(REF, SPEC).frames, truth)
    write_video(media / "clip.mp4", numbered_frames(40)[::-1])
    np.testing.assert_array_equal(cache.load(REF, SPEC).frames, decode_spec(media / "clip.mp4", SPEC)[0])
    np.testing.assert_array_equal(cache.load(REF, SPEC).frames, decode_spec(media / "clip.mp4", SPEC)[0])


def test_quarantine_persists_until_the_file_changes(media, tmp_path):
    good = (media / "clip.mp4").read_bytes()
    (media / "clip.mp4").write_bytes(good[: len(good) // 2])
    cache = VideoCache(tmp_path / "cache", media)
    with pytest.raises(MediaError, match="cannot be opened"):
        cache.load(REF, SPEC)
    again = VideoCache(tmp_path / "cache", media)
    with pytest.raises(MediaError, match="quarantined: cannot be opened"):
        again.load(REF, SPEC)
    assert again.counters["quarantined"] == 1
    assert [entry["name"] for entry in again.quarantine.entries()] == ["clip.mp4"]
    (media / "clip.mp4").write_bytes(good)
    assert again.load(REF, SPEC).grid == (4, 4, 6)
    assert again.quarantine.clear() == 1
    assert again.quarantine.entries() == []


def test_missing_files_are_not_quarantined(media, tmp_path):
    cache = VideoCache(tmp_path / "cache", media)
    with pytest.raises(MediaError, match="No such file"):
        cache.load(MediaRef("absent.mp4"), SPEC)
    assert cache.quarantine.entries() == []


def test_artefacts_of_the_reference_are_read(media, truth, tmp_path):
    import torch

    _, plan = decode_spec(media / "clip.mp4", SPEC)
    metadata = {"fps": 10.0, "frames_indices": list(plan.indices), "total_num_frames": 40, "video_backend": "decord"}
    good = {
        "frames": torch.from_numpy(truth).float(),
        "metadata": metadata,
        "sample_fps": 2.0,
        "preprocess_version": "v1",
    }
    torch.save(good, tmp_path / "good.pt")
    cache = VideoCache(None, media)
    ref = MediaRef(str(tmp_path / "good.pt"))
    video = cache.load(ref, SPEC)
    np.testing.assert_array_equal(video.frames, truth)
    assert video.digest == cache.load(REF, SPEC).digest
    assert cache.plan(ref, SPEC) == plan
    with pytest.raises(MediaError, match=r"sampled differently from fps=1\.0"):
        cache.load(ref, VideoSpec(min_pixels=1024, max_frames=16, fps=1.0))
    torch.save({**good, "frames": good["frames"] + 0.5}, tmp_path / "float.pt")
    with pytest.raises(MediaError, match="not integers"):
        cache.load(MediaRef(str(tmp_path / "float.pt")), SPEC)
    torch.save({**good, "extra": Path("x")}, tmp_path / "code.pt")  # an object: never unpickled
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:3000])
    torch.save([1], tmp_path / "list.pt")
    for name, message in (
        ("code", "not a readable"),
        ("cut", "not a readable"),
        ("list", "not a video"),
        ("no", "No such"),
    ):
        with pytest.raises(MediaError, match=message):
            cache.load(MediaRef(str(tmp_path / f"{name}.pt")), SPEC)
