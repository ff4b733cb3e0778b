"""Where a benchmark's files lie and what their fields are called; one `Source` per published layout.

Texts with `{field}` are filled from the record; `{_row}` is its 0-based place in its file, `{_file}` the file's name
without endings, `{_folder}` its folder's, `{_task}` what `file_pattern` finds in that name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.records import Record, read_objects
from datamodules.types import MediaRef
from eval.benchmarks.drafts import option_texts
from eval.benchmarks.media import MediaFinder


def lookup(record: Any, name: str) -> Any:
    """Field of a record by its dotted name ("metadata.subject"), or None. "a|b" is the first of them that is there."""
    if "|" in name:
        return next((value for part in name.split("|") if (value := lookup(record, part)) is not None), None)
    if isinstance(record, dict) and name in record:
        return record[name]
    value = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


class _Fields(dict):
    """Record for `str.format_map`; an absent field becomes "" so that alternative patterns can be tried."""

    def __missing__(self, key: str) -> str:
        return ""


def fill(template: str, record: Mapping[str, Any]) -> str:
    """`template` with the record's fields; "{metadata[subject]}" reaches into mappings."""
    return template.format_map(_Fields(record))


@dataclass(frozen=True, kw_only=True)
class Source:
    """One published form of a benchmark's annotations.

    Example: `Source(files={"test": ["videomme/test-*.parquet"]}, uid="{question_id}", question="question",
    options="options", answer="answer", media=["data/{videoID}.mp4"])`.
    """

    files: Mapping[str, Sequence[Any]]
    """Split -> file patterns below the benchmark's folder. An entry that is a list names alternatives: the first that
    exists is read. Every entry must be there."""
    name: str = "official"
    """`official` (more words may follow), or `reference` for EasyVideoR1's normalised files."""
    uid: str = "{_file}-{_row}"
    """Identifier within the benchmark."""
    question: str = "question"
    options: Any = "options"
    """Field with the options; a list of fields, one per option; "inline" = they stand in the question; null = none."""
    absent_option: str = "N/A"
    """Value by which a column says that there is no such option."""
    answer: str = "answer"
    answer_form: str = "auto"
    """letter, text, index, auto, or plain (no options; the answer is taken as it is)."""
    media: Sequence[str] = ("{video}",)
    """Paths of the video below the folder, tried in order."""
    precut: Sequence[str] = ()
    """Paths of ready-cut clips, tried when none of `media` exists; start and end do not apply to them."""
    start: str | None = None
    """Field with the start of the used part in seconds."""
    end: str | None = None
    folder_fps: float | None = None
    """Frames per second of media that are folders of numbered frames; a number in the record's `fps` goes before."""
    expand: str | None = None
    """Field with a list of questions per record; each becomes one record together with the outer fields."""
    file_pattern: str | None = None
    """Regular expression on `{_file}` whose first group becomes `{_task}`."""
    signature: Sequence[str] = ()
    """Fields that the first record must have; tells layouts apart that use one file name."""
    present: Sequence[str] = ()
    """Fields without which a record does not belong to the split."""
    absent: Sequence[str] = ()
    """Fields with which a record does not belong to the split."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value (or list of values) that a record must have to belong to the split."""
    skip: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value (or list of values) of records that are left out (items without published labels)."""
    derive: Mapping[str, Any] = field(default_factory=dict)
    """New field -> [field, regular expression with one group]: fields that stand only inside other fields."""
    first: int | None = None
    """Only the first questions of the files belong to the split; None = all."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Questions per split in *these* files where that differs from the official count."""

    def find(self, folders: Sequence[Path], split: str) -> tuple[list[Path], list[str]]:
        """(files found, patterns without a file) of a split; each pattern is looked for in every folder."""
        found: list[Path] = []
        missing: list[str] = []
        for entry in self.files.get(split, ()):
            patterns = [entry] if isinstance(entry, str) else list(entry)
            for place, pattern in ((f, p) for p in patterns for f in folders):
                # Each file also in its gzipped form.
                paths = sorted(path for path in {*place.glob(pattern), *place.glob(f"{pattern}.gz")} if path.is_file())
                if paths:
                    found += [path for path in paths if path not in found]
                    break
            else:
                missing.append(patterns[0])
        if found and self.signature:
            first = next(iter(read_objects(found[0])), {})
            if any(lookup(first, name) is None for name in self.signature):
                return [], [str(entry) for entry in self.files[split]]
        return found, missing

    def records(self, paths: Sequence[Path]) -> Iterator[Record]:
        """All records of the split, in the files' order."""
        return itertools.islice(filter(self._belongs, self._records(paths)), self.first)

    def _records(self, paths: Sequence[Path]) -> Iterator[Record]:
        for path in paths:
            stem = path.name.split(".")[0]
            place: Record = {"_file": stem, "_folder": path.parent.name}
            if self.file_pattern and (match := re.search(self.file_pattern, stem)):
                place["_task"] = match.group(1)
            for row, record in enumerate(itertools.chain.from_iterable(map(self._parts, read_objects(path)))):
                full = {**record, **place, "_row": row}
                for name, (origin, pattern) in self.derive.items():
                    if match := re.search(pattern, str(lookup(full, origin) or "")):
                        full[name] = match.group(1)
                yield full

    def _parts(self, outer: Record) -> Iterable[Record]:
        """The questions of a record of the file."""
        if not self.expand:
            return [outer]
        rest = {key: value for key, value in outer.items() if key != self.expand}
        return [{**rest, **part, "_part": i} for i, part in enumerate(outer.get(self.expand) or [])]

    def _belongs(self, record: Record) -> bool:
        def matches(key: str, value: Any) -> bool:
            return lookup(record, key) in (value if isinstance(value, (list, tuple)) else [value])

        return (
            all(lookup(record, name) is not None for name in self.present)
            and all(lookup(record, name) is None for name in self.absent)
            and all(matches(key, value) for key, value in self.only.items())
            and not any(matches(key, value) for key, value in self.skip.items())
        )

    def option_texts(self, record: Record) -> tuple[str, ...]:
        """Texts of the record's options without their letters; empty where they stand in the question."""
        if self.options in (None, "inline"):
            return ()
        if isinstance(self.options, str):
            return option_texts(lookup(record, self.options))
        columns = [lookup(record, name) for name in self.options]
        return option_texts([value for value in columns if value is not None and value != self.absent_option])

    def video(self, record: Record, media: MediaFinder) -> MediaRef:
        """The record's video with start and end; a ready-cut clip is used whole."""
        whole = [path for pattern in self.media if (path := fill(pattern, record))]
        if media.first(whole) is None:
            clip = media.first([path for pattern in self.precut if (path := fill(pattern, record))])
            if clip is not None:
                return MediaRef(clip)
        times = [lookup(record, name) if name else None for name in (self.start, self.end)]
        start, end = (None if time in (None, "") else float(time) for time in times)
        return MediaRef(media.place(whole or ["(no video is named)"]), start, end)

    def frame_rate(self, record: Mapping[str, Any]) -> float | None:
        """Frames per second of the record's video, should it be a folder of frames."""
        stated = record.get("fps")
        return float(stated) if isinstance(stated, (int, float)) and stated > 0 else self.folder_fps


@dataclass(frozen=True, kw_only=True)
class ReferenceSource(Source):
    """EasyVideoR1's normalised files: `problem`, `options`, `solution`, `path`, `problem_id`."""

    name: str = "reference"
    uid: str = "ref-{problem_id}"
    question: str = "problem"
    answer: str = "solution"
    media: Sequence[str] = ("{path}",)
