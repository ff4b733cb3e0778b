"""How a benchmark is loaded: find the files, read the records, draft and word the questions, check everything."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.records import Record
from datamodules.types import Sample
from datamodules.video.spec import VideoSpec
from eval.benchmarks import prompts
from eval.benchmarks.base import Benchmark
from eval.benchmarks.drafts import Draft
from eval.benchmarks.frame_policy import frame_options
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source
from eval.benchmarks.subtitles import place_subtitles
from eval.benchmarks.types import BenchmarkItem, FileStatus, LoadReport


def load(
    benchmark: Benchmark,
    data_root: str | Path,
    style: str = "official",
    frame_policy: str = "official",
    split: str | None = None,
    limit: int | None = None,
    source: str | None = None,
    available_only: bool = False,
    video_spec: VideoSpec | None = None,
) -> tuple[list[BenchmarkItem], LoadReport]:
    """Items of a split in the files' order, and what was found on disk.

    Args:
        benchmark: what is loaded.
        data_root: folder that holds `<name>/` with the files as they were downloaded (or the files themselves).
        style: prompt style: official, cot or qwen3vl.
        frame_policy: official, qwen3vl or reference; matters here for subtitles, which follow the frames.
        split: None = the default split.
        limit: only the first `limit` items; the report is then partial.
        source: official or reference; None = the first whose files are there.
        available_only: leave out items whose media are missing; the report is then partial.
        video_spec: how the videos are sampled, where subtitles follow the frames (`follows_frames`); None = as the
            frame policy says, for Qwen3-VL.

    Raises:
        ValueError: the split or style is unknown, or no source's files are complete (the message lists them).
    """
    root, split = Path(data_root), split or benchmark.split
    if video_spec is None and benchmark.follows_frames:
        video_spec = VideoSpec(**frame_options(frame_policy, benchmark.frames))
    chosen, paths = _choose(benchmark, root, split, source)
    media = MediaFinder(_folders(benchmark, root))
    drafts, repeated = _unique(_drafted(benchmark, chosen, paths, media))
    num_all = len(drafts)
    if available_only:
        drafts = [d for d in drafts if not any(m.path in media.missing for m in (*d.videos, *d.images))]
    drafts = drafts if limit is None else drafts[:limit]
    items = [_item(benchmark, draft, style, video_spec, media) for draft in drafts]
    notes = _notes(benchmark, split, chosen, drafts, num_all, media, style)
    expected = benchmark.expected[split]
    needed = {m.path for d in drafts for m in itertools.chain(d.videos, d.images)}
    return items, LoadReport(
        benchmark=benchmark.name,
        split=split,
        source=chosen.name,
        files=tuple(str(path) for path in paths),
        expected_n=expected,
        n=len(drafts),
        duplicates=tuple(repeated),
        gold_missing=tuple(d.uid for d in drafts if not d.gold_ok),
        missing_media=tuple(sorted(media.missing & needed)),
        is_partial=len(drafts) < max(num_all, chosen.expected.get(split) or 0, expected or 0),
        notes=tuple(notes),
    )


def file_status(benchmark: Benchmark, data_root: str | Path) -> list[FileStatus]:
    """Per split: which files are on this disk."""
    return [_split_status(benchmark, Path(data_root), split) for split in benchmark.expected]


def _folders(benchmark: Benchmark, root: Path) -> tuple[Path, ...]:
    """Where a benchmark's files may lie: its folder, that of the benchmark it is a variant of, the root itself."""
    return (*(root / name for name in (benchmark.name, benchmark.variant_of) if name), root)


def _drafted(benchmark: Benchmark, source: Source, paths: Sequence[Path], media: MediaFinder) -> Iterator[Draft]:
    """The benchmark's questions; a record that is not what it should be is named."""
    current: list[Record] = []

    def records() -> Iterator[Record]:
        for record in source.records(paths):
            current[:] = [record]
            yield record
            current.clear()

    try:
        yield from benchmark.drafts(records(), source, media)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        where = ", ".join(f"record {r['_row']} of {r['_folder']}/{r['_file']}" for r in current) or paths[0].parent
        raise ValueError(f"{benchmark.title}: cannot read {where}: {type(error).__name__}: {error}") from error


def _choose(benchmark: Benchmark, root: Path, split: str, wanted: str | None) -> tuple[Source, list[Path]]:
    if split not in benchmark.expected:
        raise ValueError(f"{benchmark.name} has no split {split!r}; it has {', '.join(benchmark.expected)}")
    sources = [source for source in benchmark.sources if split in source.files]
    chosen = [source for source in sources if wanted in (None, source.name, source.name.split()[0])]
    if not chosen:
        known = ", ".join(source.name for source in sources)
        raise ValueError(f"{benchmark.name} has no source {wanted!r} for its split {split}; it has {known}")
    lacking = []
    for source in chosen:
        found, missing = source.find(_folders(benchmark, root), split)
        if found and not missing:
            return source, found
        lacking.append(f"{source.name}: {', '.join(missing)}")
    raise ValueError(
        f"{benchmark.title} ({split}): annotation files are missing below {root / benchmark.name} or {root}; "
        f"{'; '.join(lacking)}. "
        f"`python scripts/prepare_benchmarks.py {benchmark.name} --data-root {root}` fetches them or says how"
    )


def _unique(drafts: Iterable[Draft]) -> tuple[list[Draft], list[str]]:
    """(drafts, repeated uids): later items of a uid get `#2`, `#3`, so that no answer overwrites another's."""
    seen: Counter[str] = Counter()
    out, repeated = [], []
    for draft in drafts:
        seen[draft.uid] += 1
        if seen[draft.uid] > 1:
            repeated.append(f"{draft.uid}#{seen[draft.uid]}")
            out.append(replace(draft, uid=repeated[-1]))
        else:
            out.append(draft)
    return out, repeated


def _item(
    benchmark: Benchmark, draft: Draft, style: str, video_spec: VideoSpec | None, media: MediaFinder
) -> BenchmarkItem:
    """Word one question and pack it up."""
    tags: str | None = None
    videos, subtitles, options = draft.videos, "", dict[str, Any]()
    if benchmark.subtitles != "none":
        videos, tags, subtitles, options = place_subtitles(benchmark, draft, video_spec, media)
    text = prompts.render(benchmark.template(style, draft), draft, media=tags, subtitles=subtitles)
    sample = Sample(
        uid=draft.uid,
        problem=text,
        answer=draft.answer,
        problem_type=draft.problem_type,
        data_type="mixed" if videos and draft.images else "video" if videos else "image" if draft.images else "text",
        options=draft.options,
        images=draft.images,
        videos=videos,
        data_source=benchmark.name,
        extra={"question": draft.question, **draft.extra},
    )
    official = style == "official"
    return BenchmarkItem(
        uid=draft.uid,
        sample=sample,
        meta=draft.meta,
        needs_judge=draft.needs_judge,
        system=benchmark.system if official else None,
        answer_prefix=benchmark.answer_prefix if official else "",
        frame_options=options,
        folder_fps=draft.folder_fps if any(Path(ref.path).is_dir() for ref in videos) else None,
        media_bytes=tuple(media.size(ref.path) for ref in (*videos, *draft.images)),
    )


def _notes(
    benchmark: Benchmark,
    split: str,
    source: Source,
    drafts: Sequence[Draft],
    num_all: int,
    media: MediaFinder,
    style: str,
) -> list[str]:
    """What a reader of the figures has to know about the questions, one sentence each."""
    expected = benchmark.expected[split]
    notes: list[str] = []
    in_file = source.expected.get(split, expected)
    if in_file is not None and num_all != in_file:
        notes.append(f"{num_all} questions in the files, {in_file} were expected")
    if expected is not None and num_all != expected:
        notes.append(f"the official split has {expected} questions, these files {num_all}")
    if expected is None:
        notes.append("the official number of questions is not published")
    if short := [d.uid for d in drafts if len(d.texts) == 1]:
        notes.append(f"{len(short)} questions have a single option: {', '.join(short[:5])}")
    same = Counter((d.question, d.texts, d.answer, d.videos) for d in drafts)
    if copies := sum(count - 1 for count in same.values()):
        notes.append(f"{copies} questions repeat another one word for word; they are all asked and counted")
    if style == "official" and "official" not in benchmark.prompts:
        notes.append("no official prompt is published; the words of style qwen3vl are used")
    if media.num_without_subtitles:
        notes.append(f"{media.num_without_subtitles} questions have no subtitle file; they are asked without subtitles")
    if broken := media.broken_subtitles:
        notes.append(f"{len(broken)} questions are asked without subtitles, their file is damaged: {broken[0]}")
    return notes


def _split_status(benchmark: Benchmark, root: Path, split: str) -> FileStatus:
    """What lies on this disk of one split."""
    chosen: str | None = None
    found: list[Path] = []
    missing: list[str] = []
    for source in benchmark.sources:
        if split in source.files:
            try:
                here, names = source.find(_folders(benchmark, root), split)
                absent = [f"{benchmark.name}/{name}" for name in names]
            except ValueError as error:  # what is there is damaged
                here, absent = [], [str(error)]
            if chosen is None and here and not absent:
                chosen, found = source.name, here
            if not missing and source.name == "official" and chosen is None:
                missing = absent
    return FileStatus(
        split=split,
        expected_n=benchmark.expected[split],
        source=chosen,
        found=tuple(str(path) for path in found),
        missing=tuple(missing),
    )
