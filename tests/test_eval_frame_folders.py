"""Benchmarks whose videos are folders of numbered frames: the frames, times and prompt of the same video file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from eval_official_files import mvbench

from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.cache import VideoCache
from datamodules.video.frame_folder import frame_files, read_frame_folder
from datamodules.video.spec import VideoSpec
from eval.benchmarks import catalogue
from eval.benchmarks.loading import load
from eval.run.prepare import PrepareSettings
from lightning_modules.families.qwen3_vl import Qwen3VLFamily

FPS, COUNT = 3, 40


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """Forty different pictures of 96 x 64, smooth enough for any resizing."""
    rows, columns = np.mgrid[0:64, 0:96]
    return np.stack(
        [np.stack([rows * 3, columns * 2, np.full_like(rows, 6 * i)], axis=-1).astype(np.uint8) for i in range(COUNT)]
    )


def write_folder(folder: Path, frames: np.ndarray, first: int = 1, suffix: str = "png") -> Path:
    from PIL import Image

    folder.mkdir(parents=True)
    for number, frame in enumerate(frames, start=first):
        # No leading zeros: names that sort wrongly as text.
        Image.fromarray(frame).save(folder / f"{number}.{suffix}")
    return folder


def write_video(path: Path, frames: np.ndarray) -> Path:
    """The same frames without loss, at the same rate."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("start", "end", "options"),
    [
        (None, None, {"fps": 1.0}),
        (2.0, 9.5, {"fps": 3.0}),  # frames 6 to 28: no frame before 2.0 s and none after 9.5 s
        (0.1, 0.2, {"fps": 2.0}),  # no frame inside: the nearest one
        (None, None, {"fps": 2.0, "min_frames": 16, "max_frames": 16}),
    ],
)
def test_a_folder_gives_what_the_same_video_gives(tmp_path, frames, start, end, options):
    folder = write_folder(tmp_path / "clip", frames)
    video = write_video(tmp_path / "clip.mov", frames)
    spec = VideoSpec(max_pixels=4096, min_pixels=1024, **options)
    found = read_frame_folder(folder, spec, FPS, start, end)
    expected = VideoCache(None).load(MediaRef(str(video), start, end), spec)
    assert found.metadata.frames_indices == expected.metadata.frames_indices
    assert found.metadata.fps == expected.metadata.fps == FPS
    assert (found.grid, found.digest) == (expected.grid, expected.digest)
    np.testing.assert_array_equal(np.asarray(found.frames), np.asarray(expected.frames))


def test_the_clip_limits_are_exact(tmp_path, frames):
    folder = write_folder(tmp_path / "clip", frames, first=0)
    found = read_frame_folder(folder, VideoSpec(fps=3.0, max_pixels=None), FPS, 2.0, 9.5)
    # By hand: 2.0 s x 3 = frame 6, 9.5 s x 3 = 28.5, so frame 28; 23 frames, 22 of them by linspace.
    assert (found.metadata.frames_indices[0], found.metadata.frames_indices[-1]) == (6, 28)
    assert len(found.metadata.frames_indices) == 22


def test_a_gap_a_damaged_frame_and_names_without_numbers_are_named(tmp_path, frames):
    folder = write_folder(tmp_path / "gap", frames[:5])
    assert [path.name for path in frame_files(folder)] == ["1.png", "2.png", "3.png", "4.png", "5.png"]
    (folder / "3.png").unlink()
    with pytest.raises(MediaError, match=r"gap.*frame 3 is missing"):
        frame_files(folder)
    (folder / "5.png").rename(folder / "3.png")
    (folder / "2.png").write_bytes((folder / "4.png").read_bytes()[:60])
    with pytest.raises(MediaError, match=r"gap/2\.png.*not a readable picture"):
        read_frame_folder(folder, VideoSpec(fps=3.0), FPS)
    (folder / "3.png").rename(folder / "cover.png")
    with pytest.raises(MediaError, match=r"cover\.png has no number"):
        frame_files(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MediaError, match="holds no frame"):
        frame_files(tmp_path / "empty")


def test_episodic_reasoning_of_mvbench_is_asked_from_its_frames(tmp_path, frames, tiny_model_dir):
    from eval_helpers import write_json

    data = tmp_path / "mvbench"
    mvbench(data)
    record = {"video": "castle_s01e01_clip_00", "question": "Who enters?", "candidates": ["Kate", "Rick"]}
    record |= {"answer": "Rick", "start": 2.0, "end": 9.5}
    write_json(data / "json" / "episodic_reasoning.json", [record])
    folder = write_folder(data / "video/tvqa/frames_fps3_hq/castle_s01e01_clip_00", frames, suffix="jpg")
    items, report = load(catalogue.get("mvbench"), tmp_path)
    (item,) = [entry for entry in items if entry.uid == "mvbench:episodic_reasoning-0"]
    assert item.sample.videos == (MediaRef(str(folder), 2.0, 9.5),)
    assert item.folder_fps == FPS
    assert str(folder) not in report.missing_media
    preparer = PrepareSettings(str(tiny_model_dir), Qwen3VLFamily(), benchmark_frames=catalogue.get("mvbench").frames)()
    ready = preparer(item)
    (video,) = ready.prompt.videos
    # The official policy: 16 frames, evenly from 2.0 s to 9.5 s; pairs of them are one time in the prompt.
    assert video.metadata.frames_indices[:3] == [6, 7, 9]
    assert ready.num_frames == 16
    # (6 + 7) / 2 / 3 = 2.17 s for the first pair, (27 + 28) / 2 / 3 = 9.17 s for the last.
    times = re.findall(r"<([\d.]+) seconds>", preparer.processor.tokenizer.decode(ready.prompt.expanded_ids))
    assert (times[0], times[-1], len(times)) == ("2.2", "9.2", 8)
