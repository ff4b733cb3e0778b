"""Subtitles in a prompt: listed in front of the question, or interleaved with the frames they belong to.

Which lines are used depends on the sampled frames, so the frame policy is applied here too, from the container's
metadata alone. Interleaving cuts the video into consecutive parts that together sample the same frames at the same
size; times stay those of the whole video.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.errors import MediaError
from datamodules.records import json_lines
from datamodules.types import MediaRef
from datamodules.video.probe import probe
from datamodules.video.spec import TOTAL_TOKENS, VIDEO_MAX_TOKENS, VideoInfo, VideoPlan, VideoSpec
from eval.benchmarks.base import Benchmark
from eval.benchmarks.drafts import Draft
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import fill, lookup

MODES = ("none", "listed", "full", "interleaved")
_SRT_TIMES = re.compile(r"(\d+:\d+:\d+[.,]\d+)\s*-->\s*(\d+:\d+:\d+[.,]\d+)")


@dataclass(frozen=True)
class Line:
    """One subtitle line with its interval in seconds."""

    start: float
    end: float
    text: str


def seconds(time: Any) -> float:
    """ "01:02:03,5", "01:02:03.5", "63.5" or a number in seconds."""
    if isinstance(time, (int, float)):
        return float(time)
    total = 0.0
    for part in str(time).replace(",", ".").split(":"):
        total = total * 60 + float(part)
    return total


def read_subtitles(path: Path, offset: float = 0.0) -> list[Line]:
    """Lines of an SRT, JSON or JSONL file, shifted by `offset` seconds to the left.

    JSON entries hold `timestamp` [start, end] and `text`; `start`, `end`, `line`; or `start_time`, `end_time`, `text`.

    Raises:
        ValueError: the file is none of these.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    found: list[tuple[Any, Any, str]] = []
    if path.suffix.lower() == ".srt":
        for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
            if times := _SRT_TIMES.search(block):
                words = re.sub(r"<[^>]+>", "", block[times.end() :])
                found.append((times.group(1), times.group(2), " ".join(words.split())))
    try:
        if path.suffix.lower() != ".srt":
            is_lines = path.suffix == ".jsonl"
            rows = [row for _, row in json_lines(text)] if is_lines else json.loads(text)
            for row in rows:
                if "timestamp" in row:
                    start, end = row["timestamp"]
                    found.append((start, seconds(start) + 1 if end is None else end, row["text"]))
                elif "line" in row:
                    found.append((row["start"], row["end"], row["line"]))
                else:
                    found.append((row["start_time"], row["end_time"], row["text"]))
        lines = [Line(seconds(start) - offset, seconds(end) - offset, str(said).strip()) for start, end, said in found]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a known form of subtitles ({error})") from error
    return [line for line in lines if line.text]


def covering(lines: Sequence[Line], times: Sequence[float], widen: bool = False) -> list[Line]:
    """Lines during which a frame is shown.

    Args:
        lines: all lines.
        times: seconds of the frames.
        widen: take lines of less than a second as one second around their middle (LongVideoBench).
    """
    kept = []
    for line in lines:
        start, end = line.start, line.end
        if widen and end - start < 1:
            middle = (start + end) / 2
            start, end = middle - 0.5, middle + 0.5
        if any(start <= time < end for time in times):
            kept.append(line)
    return kept


def interleave(lines: Sequence[Line], times: Sequence[float], unit: int) -> list[tuple[int, list[str]]]:
    """(number of frames before, texts) in order: where the video is cut and what is said there.

    A line stands behind the frames up to its middle. Cuts fall on multiples of `unit` frames, the fewest that a part
    of a video may have.
    """
    total = len(times)
    places: dict[int, list[str]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: (line.start + line.end) / 2):
        before = sum(time <= (line.start + line.end) / 2 for time in times)
        place = round(before / unit) * unit
        places[place if total - place >= unit else total].append(line.text)
    return sorted(places.items())


def place_subtitles(
    benchmark: Benchmark, draft: Draft, spec: VideoSpec | None, media: MediaFinder
) -> tuple[tuple[MediaRef, ...], str | None, str, dict[str, Any]]:
    """(videos, media text or None, listed subtitles, VideoSpec fields of the item) for one question."""
    if benchmark.subtitles not in MODES:
        raise ValueError(f"{benchmark.name}: subtitles={benchmark.subtitles!r}; use one of {', '.join(MODES)}")
    path = media.first([fill(pattern, draft.meta) for pattern in benchmark.subtitle_files])
    if path is None:
        media.num_without_subtitles += 1
        return draft.videos, None, "", {}
    try:
        lines = read_subtitles(Path(path), float(lookup(draft.meta, "starting_timestamp_for_subtitles") or 0.0))
    except (ValueError, OSError) as error:
        media.broken_subtitles.append(str(error))
        return draft.videos, None, "", {}
    if spec is None or not benchmark.follows_frames:
        return draft.videos, None, " ".join(line.text for line in lines), {}
    video = draft.videos[0]
    try:
        info = probe(video.path)
        frames = spec.plan(info, video.start, video.end, video.path)
    except MediaError:  # without the video nothing is known about frames; the item fails on the video anyway
        return draft.videos, None, "\n".join(line.text for line in lines), {}
    times = [index / info.fps for index in frames.indices]
    if benchmark.subtitles == "listed" or len(set(frames.indices)) < len(frames.indices):
        return draft.videos, None, "\n".join(line.text for line in covering(lines, times)), {}
    cuts = interleave(covering(lines, times, widen=True), times, max(spec.min_frames, spec.temporal_patch))
    videos, text = _parts(video.path, cuts, info, frames)
    # The bound on a frame's pixels that the whole video has, so that its parts get the same size.
    area = spec.factor**2
    total = TOTAL_TOKENS * area if spec.total_pixels is None else spec.total_pixels
    per_frame = total / len(frames.indices) * spec.temporal_patch
    cap = max(min(VIDEO_MAX_TOKENS * area, per_frame), spec.frame_min_pixels * 1.05)
    return videos, text, "", {"max_pixels": int(cap if spec.max_pixels is None else min(cap, spec.max_pixels))}


def _parts(
    path: str, cuts: Sequence[tuple[int, list[str]]], info: VideoInfo, plan: VideoPlan
) -> tuple[tuple[MediaRef, ...], str]:
    """Parts of the video and the text with a `<video>` per part and the subtitles between them."""
    indices, begin = plan.indices, 0
    videos: list[MediaRef] = []
    text: list[str] = []
    for place, words in [*cuts, (len(indices), [])]:
        if place > begin:
            first, last = indices[begin], indices[place - 1]
            # A quarter of a frame keeps the ends on their frames whatever is rounded; half a frame, the count.
            rate = (place - begin + 0.5) * info.fps / (last - first + 1)
            videos.append(MediaRef(path, max(0.0, (first - 0.25) / info.fps), (last + 0.25) / info.fps, rate))
            text.append("<video>")
            begin = place
        text += words
    return tuple(videos), "\n".join(text)
