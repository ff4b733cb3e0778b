"""How a benchmark is loaded: find the files, read the records, draft and word the questions, check everything."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.types import MediaRef, Sample
from datamodules.video.frame_folder import is_frame_folder
from eval.benchmarks import prompts
from eval.benchmarks.drafts import Draft, gold_letter, inline_options, option_texts, strip_tags
from eval.benchmarks.readers import Record, lookup
from eval.benchmarks.source import Source, fill
from eval.benchmarks.types import BenchmarkItem, FileStatus, LoadReport

if TYPE_CHECKING:
    from datamodules.video.spec import VideoSpec
    from eval.benchmarks.base import Benchmark


@dataclass(frozen=True)
class Wording:
    """What decides how a question is put to the model."""

    style: str = "official"
    frame_policy: str = "official"
    video_spec: VideoSpec | None = None
    """How the videos are sampled; None = as the frame policy says, for Qwen3-VL."""


class MediaFinder:
    """Finds media below the benchmark's folders and remembers what is missing.

    Args:
        folders: tried in order; a file that is in none is expected in the first.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.missing: set[str] = set()
        self.num_without_subtitles = 0
        self.broken_subtitles: list[str] = []
        self._known: dict[str, Path | None] = {}
        self._sizes: dict[str, int] = {}

    def find(self, relative: str) -> Path | None:
        """The file (or folder of frames), or None. `videos/` in front of the path and its plain name are tried too."""
        if relative not in self._known:
            clean = relative.removeprefix("./")
            places = dict.fromkeys([clean, f"videos/{clean}", Path(clean).name, f"videos/{Path(clean).name}"])
            self._known[relative] = next(
                (folder / p for folder in self.folders for p in places if p and _is_medium(folder / p)), None
            )
        return self._known[relative]

    def place(self, candidates: Sequence[str]) -> str:
        """Absolute path of the first candidate that exists; else where the first is expected, noted as missing."""
        for candidate in candidates:
            if found := self.find(candidate):
                return str(found)
        expected = str(self.folders[0] / candidates[0].removeprefix("./"))
        self.missing.add(expected)
        return expected

    def size(self, path: str) -> int:
        """Bytes of a file or of all files of a folder; 0 when there is none."""
        if path not in self._sizes:
            place = Path(path)
            files = place.iterdir() if place.is_dir() else [place]
            self._sizes[path] = sum(file.stat().st_size for file in files if file.is_file())
        return self._sizes[path]


def _is_medium(path: Path) -> bool:
    return path.is_file() or is_frame_folder(path)


def folders(benchmark: Benchmark, root: Path) -> tuple[Path, ...]:
    """Where a benchmark's files may lie: its folder, that of the benchmark it is a variant of, the root itself."""
    names = [benchmark.name, *([benchmark.variant_of] if benchmark.variant_of else [])]
    return (*(root / name for name in names), root)


def load(
    benchmark: Benchmark,
    root: Path,
    how: Wording,
    split: str,
    limit: int | None,
    source_name: str | None,
    available_only: bool,
) -> tuple[list[BenchmarkItem], LoadReport]:
    """See `Benchmark.load`."""
    source, paths = _choose(benchmark, root, split, source_name)
    media = MediaFinder(folders(benchmark, root))
    drafts, repeated = _unique(_drafted(benchmark, source, paths, media))
    num_all = len(drafts)
    if available_only:
        drafts = [d for d in drafts if not any(m.path in media.missing for m in (*d.videos, *d.images))]
    drafts = drafts if limit is None else drafts[:limit]
    items = [build_item(benchmark, draft, how, media) for draft in drafts]
    report = _report(benchmark, split, source, paths, drafts, num_all, media, how.style)
    return items, replace(report, duplicates=tuple(repeated))


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
        found, missing = source.find(folders(benchmark, root), split)
        if found and not missing:
            return source, found
        lacking.append(f"{source.name}: {', '.join(missing)}")
    raise ValueError(
        f"{benchmark.title} ({split}): annotation files are missing below {root / benchmark.name} or {root}; "
        f"{'; '.join(lacking)}. "
        f"`python scripts/prepare_benchmarks.py {benchmark.name} --data-root {root}` fetches them or says how"
    )


def plain_draft(benchmark: Benchmark, record: Record, source: Source, media: MediaFinder) -> Draft:
    """A question as the source's field names describe it."""
    question = str(lookup(record, source.question) or "").strip()
    if source.options == "inline":
        question, texts = inline_options(question)
    else:
        texts = _texts(record, source)
    answer, gold_ok = gold_of(lookup(record, source.answer), texts, source.answer_form)
    return Draft(
        uid=f"{benchmark.name}:{fill(source.uid, record)}",
        question=question,
        answer=answer,
        problem_type=benchmark.problem_type,
        texts=texts,
        videos=(video_of(record, source, media),),
        folder_fps=source.frame_rate(record),
        meta=record,
        gold_ok=gold_ok,
    )


def _texts(record: Record, source: Source) -> tuple[str, ...]:
    if source.options is None:
        return ()
    if isinstance(source.options, str):
        return option_texts(lookup(record, source.options))
    columns = [lookup(record, name) for name in source.options]
    return option_texts([value for value in columns if value is not None and value != source.absent_option])


def gold_of(answer: Any, texts: Sequence[str], form: str) -> tuple[str, bool]:
    """(gold answer, whether it is one). Without options it is taken as it is."""
    if form == "plain" or not texts:
        text = strip_tags(answer)
        return text, bool(text)
    try:
        return gold_letter(answer, texts, form), True
    except ValueError:
        return strip_tags(answer), False


def video_of(record: Record, source: Source, media: MediaFinder) -> MediaRef:
    """The record's video with start and end; a ready-cut clip is used whole."""
    whole = [path for pattern in source.media if (path := fill(pattern, record))]
    if not any(media.find(path) for path in whole):
        for path in (fill(pattern, record) for pattern in source.precut):
            if found := media.find(path):
                return MediaRef(str(found))
    times = [lookup(record, name) if name else None for name in (source.start, source.end)]
    start, end = (None if time in (None, "") else float(time) for time in times)
    return MediaRef(media.place(whole or ["(no video is named)"]), start, end)


def _unique(drafts: Iterable[Draft]) -> tuple[list[Draft], list[str]]:
    """(drafts, repeated uids): later items of a uid get `#2`, `#3`, so that no answer overwrites another's."""
    seen: Counter[str] = Counter()
    out, repeated = [], []
    for draft in drafts:
        seen[draft.uid] += 1
        if seen[draft.uid] > 1:
            draft = replace(draft, uid=f"{draft.uid}#{seen[draft.uid]}")
            repeated.append(draft.uid)
        out.append(draft)
    return out, repeated


def template_of(benchmark: Benchmark, style: str, draft: Draft) -> str:
    """The benchmark's own text for a style, else the shared one; without an official text qwen3vl's is used."""
    own = benchmark.prompts.get(style)
    if isinstance(own, Mapping):
        own = own.get(draft.problem_type, own.get("default"))
    if own is not None:
        return str(own)
    return prompts.shared_template("qwen3vl" if style == "official" else style)


def build_item(benchmark: Benchmark, draft: Draft, how: Wording, media: MediaFinder) -> BenchmarkItem:
    """Word one question and pack it up."""
    videos, tags, subtitles, options = draft.videos, None, "", {}
    if benchmark.subtitles != "none":
        from eval.benchmarks.subtitles import place_subtitles

        videos, tags, subtitles, options = place_subtitles(benchmark, draft, how, media)
    text = prompts.render(benchmark.template(how.style, draft), draft, media=tags, subtitles=subtitles)
    kinds = {"video": bool(videos), "image": bool(draft.images)}
    data_type = "mixed" if all(kinds.values()) else next((k for k, used in kinds.items() if used), "text")
    sample = Sample(
        uid=draft.uid,
        problem=text,
        answer=draft.answer,
        problem_type=draft.problem_type,
        data_type=data_type,  # type: ignore[arg-type]
        options=draft.options,
        images=draft.images,
        videos=videos,
        data_source=benchmark.name,
        extra={"question": draft.question, **draft.extra},
    )
    official = how.style == "official"
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


def _report(
    benchmark: Benchmark,
    split: str,
    source: Source,
    paths: Sequence[Path],
    drafts: Sequence[Draft],
    num_all: int,
    media: MediaFinder,
    style: str,
) -> LoadReport:
    expected = benchmark.expected[split]
    notes = []
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
    needed = {m.path for d in drafts for m in itertools.chain(d.videos, d.images)}
    return LoadReport(
        benchmark=benchmark.name,
        split=split,
        source=source.name,
        files=tuple(str(path) for path in paths),
        expected_n=expected,
        n=len(drafts),
        gold_missing=tuple(d.uid for d in drafts if not d.gold_ok),
        missing_media=tuple(sorted(media.missing & needed)),
        is_partial=len(drafts) < max(num_all, in_file or 0, expected or 0),
        notes=tuple(notes),
    )


def file_status(benchmark: Benchmark, root: Path, split: str) -> FileStatus:
    """What lies on this disk of one split."""
    chosen, found, missing = None, [], []
    for source in benchmark.sources:
        if split in source.files:
            try:
                here, names = source.find(folders(benchmark, root), split)
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
