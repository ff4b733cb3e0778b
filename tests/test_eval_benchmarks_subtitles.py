"""Frame policies, and subtitles that follow the sampled frames: listed or interleaved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from datamodules.video.probe import probe
from datamodules.video.spec import VideoSpec
from eval.benchmarks import catalogue
from eval.benchmarks.frame_policy import frame_options
from eval.benchmarks.loading import load
from eval.benchmarks.subtitles import Line, covering, interleave, read_subtitles
from tests import eval_official_files
from tests.data_media import numbered_frames, write_video
from tests.eval_helpers import write_json, write_jsonl


def test_frame_policies() -> None:
    assert frame_options("qwen3vl") == {"fps": 2.0, "min_frames": 4, "max_frames": 2048, "total_pixels": 229_376_000}
    assert frame_options("qwen3vl", factor=28)["total_pixels"] == 224_000 * 784
    reference = frame_options("reference")
    assert (reference["max_frames"], reference["max_pixels"], reference["total_pixels"]) == (256, 262_144, 33_554_432)
    assert frame_options("official") == frame_options("qwen3vl")
    assert frame_options("official", {"max_frames": 64}) == {"max_frames": 64}
    with pytest.raises(ValueError, match="'fast'"):
        frame_options("fast")


SRT = """1
00:00:00,500 --> 00:00:01,400
<i>hello</i> there

2
00:00:03,000 --> 00:00:03,100
too short
to be seen

3
00:00:05,000 --> 00:00:09,000
good bye
"""


def test_subtitles_are_read_in_every_form(tmp_path: Path) -> None:
    srt = tmp_path / "a.srt"
    srt.write_text(SRT, encoding="utf-8")
    lines = read_subtitles(srt)
    assert lines[0] == Line(0.5, 1.4, "hello there")
    assert lines[1] == Line(3.0, 3.1, "too short to be seen")
    spoken = write_json(tmp_path / "b.json", [{"start": "00:00:02.5", "end": "00:01:00", "line": "hi"}])
    assert read_subtitles(spoken, offset=1.0) == [Line(1.5, 59.0, "hi")]
    stamped = write_json(tmp_path / "c.json", [{"timestamp": [1.0, 2.0], "text": "hi"}])
    assert read_subtitles(stamped) == [Line(1.0, 2.0, "hi")]
    words = write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "start_time": 0.0, "end_time": 0.2}])
    assert read_subtitles(words) == [Line(0.0, 0.2, "a")]
    with pytest.raises(ValueError, match=r"e.json: not a known form"):
        read_subtitles(write_json(tmp_path / "e.json", [{"x": 1}]))


def spoken_video(root: Path, second: tuple[float, float]) -> Path:
    """LongVideoBench's folder with its video of 24 s and two lines, one from 4 to 6 s and the `second`."""
    eval_official_files.write(root, "longvideobench")
    folder = root / "longvideobench"
    (folder / "videos").mkdir()
    write_video(folder / "videos" / "86Cx.mp4", numbered_frames(240), fps=10)
    lines = [{"timestamp": [4.0, 6.0], "text": "first words"}, {"timestamp": list(second), "text": "second words"}]
    write_json(folder / "subtitles" / "86Cx_en.json", lines)
    return folder


def test_which_lines_and_where() -> None:
    lines = [Line(0.5, 1.4, "a"), Line(3.0, 3.1, "b"), Line(5.0, 9.0, "c")]
    assert [x.text for x in covering(lines, [0.0, 1.0, 3.3, 6.0])] == ["a", "c"]
    assert [x.text for x in covering(lines, [0.0, 1.0, 3.3, 6.0], widen=True)] == ["a", "b", "c"]
    times = [float(t) for t in range(12)]
    assert interleave(lines, times, unit=4) == [(0, ["a"]), (4, ["b"]), (8, ["c"])]
    assert interleave([Line(10.0, 11.0, "end")], times, unit=4) == [(12, ["end"])]


def test_listed_subtitles_follow_the_frames(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "videomme")
    folder = tmp_path / "videomme"
    (folder / "data").mkdir()
    write_video(folder / "data" / "vid_a.mp4", numbered_frames(100), fps=10)
    (folder / "subtitle").mkdir()
    (folder / "subtitle" / "vid_a.srt").write_text(SRT, encoding="utf-8")
    items, report = load(catalogue.get("videomme_sub"), tmp_path)
    text = items[0].sample.problem
    assert text.startswith("<video>\nThis video's subtitles are listed below:\nhello there\n")
    assert "good bye" in text
    assert "too short" not in text  # frames are half a second apart; none falls between 3.0 and 3.1 s
    assert report.missing_media == ()
    assert not any("subtitle" in note for note in report.notes)
    assert "subtitles" not in load(catalogue.get("videomme"), tmp_path)[0][0].sample.problem


def test_interleaved_subtitles_show_the_same_frames_at_the_same_size(tmp_path: Path) -> None:
    folder = spoken_video(tmp_path, second=(15.0, 16.0))
    (item,), _ = load(catalogue.get("longvideobench"), tmp_path, frame_policy="reference")
    assert item.sample.problem.startswith("<video>\nfirst words\n<video>\nsecond words\n<video>\nWhat is said")
    spec, info = VideoSpec(**frame_options("reference")), probe(folder / "videos" / "86Cx.mp4")
    whole = spec.plan(info)
    indices: list[int] = []
    for video in item.sample.videos:
        part = VideoSpec(**{**frame_options("reference"), **item.frame_options, "fps": video.fps})
        plan = part.plan(info, video.start, video.end)
        assert (plan.height, plan.width) == (whole.height, whole.width)
        indices += plan.indices
    assert len(indices) == len(whole.indices) == 48
    assert max(abs(a - b) for a, b in zip(indices, whole.indices, strict=True)) <= 1


def test_subtitles_follow_the_frames_that_are_really_shown(tmp_path: Path) -> None:
    """Twelve frames instead of 48, of a family with smaller visual tokens."""
    folder = spoken_video(tmp_path, second=(15.0, 16.0))
    spec = VideoSpec(min_frames=2, max_frames=12, total_pixels=12 * 784 * 40, patch_size=14)
    (item,), _ = load(catalogue.get("longvideobench"), tmp_path, video_spec=spec)
    info = probe(folder / "videos" / "86Cx.mp4")
    part = replace(spec, **item.frame_options)
    plans = [replace(part, fps=v.fps).plan(info, v.start, v.end) for v in item.sample.videos]
    assert [len(plan.indices) for plan in plans] == [4, 4, 4]
    assert {(plan.height, plan.width) for plan in plans} == {spec.resized(12, info.height, info.width)}


def test_a_run_cuts_by_its_own_frames(tmp_path: Path, tiny_model_dir: Path) -> None:
    from test_eval_pipeline_benchmark import make_run

    folder = spoken_video(tmp_path, second=(15.0, 17.0))
    run = make_run(tmp_path / "out", tmp_path, tiny_model_dir, "longvideobench")
    run.prepare()  # four frames, at 0, 8, 16 and 23.9 s: only the second line is said during one
    (item,) = run.items()
    assert item.sample.problem.startswith("<video>\nsecond words\nWhat is said")
    assert item.media_bytes == ((folder / "videos" / "86Cx.mp4").stat().st_size,)


def test_dense_subtitles_of_the_longest_video_stay_below_the_limit_of_the_engines() -> None:
    from lightning_modules.launch.config import compose

    policy = frame_options("qwen3vl")
    times = [i * 3600 / policy["max_frames"] for i in range(policy["max_frames"])]
    cuts = interleave([Line(i, i + 1, "word") for i in range(3600)], times, policy["min_frames"])
    parts = len({place for place, _ in cuts if place} | {len(times)})
    assert parts == 2048 // 4
    for driver in ("async", "ray", "lockstep"):
        config = compose("evaluate", [f"driver={driver}", "model_path=/m", "benchmarks=longvideobench"])
        assert config.driver.engine.limit_videos >= parts


def test_a_damaged_subtitle_file_is_named_and_costs_its_words_only(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "longvideobench")
    path = tmp_path / "longvideobench" / "subtitles" / "86Cx_en.json"
    path.parent.mkdir()
    path.write_text('[{"timestamp": [4.0', encoding="utf-8")
    (item,), report = load(catalogue.get("longvideobench"), tmp_path)
    assert item.sample.problem.startswith("<video>\nWhat is said")
    (note,) = (note for note in report.notes if "damaged" in note)
    assert f"1 questions are asked without subtitles, their file is damaged: {path}" in note


def test_all_words_of_a_jsonl_file_stand_in_front(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "videomme_v2")
    words = [{"text": text, "start_time": i, "end_time": i + 0.5} for i, text in enumerate(["we", "all", "go", "home"])]
    write_jsonl(tmp_path / "videomme_v2" / "subtitle" / "001.jsonl", words)
    text = load(catalogue.get("videomme_v2_sub"), tmp_path)[0][0].sample.problem
    head = (
        "<video>\nThese are the frames of a video. This video's subtitles are listed below:\nwe all go home\nQuestion:"
    )
    assert text.startswith(head)


def test_an_unknown_way_of_subtitles_is_an_error(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "videomme")
    with pytest.raises(ValueError, match=r"subtitles='spoken'; use one of none, listed"):
        load(catalogue.get("videomme", subtitles="spoken"), tmp_path)
