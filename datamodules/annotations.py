"""Read the user's records (`datamodules.records`) into `Sample`s, and say what is wrong.

Fields: `problem`; `answer` or `solution` ("<answer>X</answer>"); `problem_type`; `data_type` image|video|text;
`images`, `videos` (or `path`); `options`; optional `offline_output`, `has_offline_trajectory`, `data_source`,
`problem_id`. A video is a path or `{path, start, end, fps}`. Everything else is kept in `Sample.extra`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.prompts import slug
from datamodules.records import read_records
from datamodules.types import DataType, MediaRef, Sample

logger = logging.getLogger(__name__)

OWN_FIELDS = frozenset(
    (
        *("problem", "answer", "solution", "problem_type", "data_type", "data_source", "problem_id", "options"),
        *("images", "image", "videos", "video", "path", "video_start", "video_end"),
        *("offline_output", "has_offline_trajectory"),
    )
)


@dataclass(frozen=True)
class Issue:
    """One thing that is wrong with a record."""

    file: str
    line: int
    """1-based line of a JSON/JSONL file, 1-based row otherwise."""
    kind: str
    """Short name, for counting: "missing field", "unknown problem type", "gold not in options", "duplicate id", ..."""
    message: str
    dropped: bool = True
    """Whether the record is left out; otherwise it is used as it is."""


@dataclass
class ValidationReport:
    """Everything found while reading annotation files, before training starts."""

    num_records: int = 0
    issues: list[Issue] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Issues by kind."""
        return dict(Counter(issue.kind for issue in self.issues))

    @property
    def num_dropped(self) -> int:
        """Records left out."""
        return len({(issue.file, issue.line) for issue in self.issues if issue.dropped})

    def text(self, limit: int = 20) -> str:
        """The report for people: totals by kind, then the first `limit` places."""
        lines = [f"{self.num_records} records, {self.num_dropped} left out, {len(self.issues)} issues"]
        lines += [f"  {kind}: {count}" for kind, count in sorted(self.counts.items())]
        lines += [f"  {i.file}:{i.line}: {i.kind}: {i.message}" for i in self.issues[:limit]]
        if len(self.issues) > limit:
            lines.append(f"  ... and {len(self.issues) - limit} more")
        return "\n".join(lines)


def load_samples(
    files: Sequence[str | Path],
    type_name: Callable[[str], str] | None = None,
    strict: bool = False,
    artifacts: str | Path | None = None,
) -> tuple[list[list[Sample]], ValidationReport]:
    """Read annotation files.

    Args:
        files: paths; the format follows from the name, see `read_records`.
        type_name: the one name of a problem type, whatever its spelling or alias (`RewardRouter.type_name`); samples
            carry it, and a record whose type it refuses with ValueError is left out. None = every type is taken as
            it is written.
        strict: raise when there is any issue.
        artifacts: folder of the `.pt` files that records name as `preprocessed_video`; None = decode the videos.

    Returns:
        One list of samples per file, in file order, and the report.

    Raises:
        ValueError: a file cannot be read at all, or `strict` and there are issues.
    """
    loader = _Loader(type_name, artifacts)
    groups = [loader.read(str(file)) for file in files]
    report = loader.report
    if report.issues:
        if strict:
            raise ValueError(f"the annotation files have issues (strict=true)\n{report.text()}")
        logger.warning("annotation files: %s", report.text())
    return groups, report


class _Loader:
    """Checks records one by one; what is wrong goes into `report`."""

    def __init__(self, type_name: Callable[[str], str] | None, artifacts: str | Path | None) -> None:
        self.type_name, self.artifacts = type_name, artifacts
        self.report = ValidationReport()
        self._seen: dict[str, tuple[Sample, str, int]] = {}

    def read(self, file: str) -> list[Sample]:
        """The usable samples of one file."""
        samples = []
        for place, (line, record) in enumerate(read_records(Path(file)), 1):
            self.report.num_records += 1
            try:
                sample = self._unique(self._checked(record, file, place), file, line, place)
            except _Unusable as problem:
                self.report.issues.append(Issue(file, line, *problem.args))
            else:
                samples.append(sample)
        return samples

    def _checked(self, record: Any, file: str, place: int) -> Sample:
        if not isinstance(record, Mapping):
            raise _Unusable("not a record", f"expected an object with fields, got {type(record).__name__}")
        missing = [name for name in ("problem", "problem_type") if not str(record.get(name) or "").strip()]
        if record.get("answer") is None and record.get("solution") is None:
            missing.append("answer (or solution)")
        if missing:
            raise _Unusable("missing field", ", ".join(missing))
        try:
            sample = to_sample(record, file, place, self.artifacts)
        except ValueError as error:
            raise _Unusable("bad field", str(error)) from error
        if self.type_name is not None:
            try:
                sample = replace(sample, problem_type=self.type_name(sample.problem_type))
            except ValueError as error:
                raise _Unusable("unknown problem type", str(error)) from error
        if not gold_fits(sample):
            raise _Unusable("gold not in options", f"{sample.answer!r} not among {list(sample.options)}")
        return sample

    def _unique(self, sample: Sample, file: str, line: int, place: int) -> Sample:
        first, first_file, first_line = self._seen.setdefault(sample.uid, (sample, file, line))
        if first is sample:
            return sample
        message = f"{sample.uid} also at {first_file}:{first_line}"
        if first == sample:
            raise _Unusable("duplicate id", f"{message} (same record)")
        self.report.issues.append(Issue(file, line, "duplicate id", message, dropped=False))
        renamed = replace(sample, uid=f"{sample.uid}#{Path(file).stem}:{place}")
        self._seen[renamed.uid] = (renamed, file, line)
        return renamed


class _Unusable(Exception):
    """(kind, message) of the issue because of which a record is left out."""


def to_sample(record: Mapping[str, Any], file: str = "", place: int = 0, artifacts: str | Path | None = None) -> Sample:
    """Normalise one record.

    Args:
        record: the fields.
        file: where it comes from; names its source when the record does not.
        place: its number in the file, for records without an id.
        artifacts: folder of the `.pt` files named by `preprocessed_video`; None = use the videos themselves.

    Raises:
        ValueError: a field has the wrong form, or `data_type` and the media contradict each other.
    """
    source = str(record.get("data_source") or Path(file).name.split(".")[0])
    identifier = record.get("problem_id")
    images, videos = _media(record)
    if artifacts is not None and videos and record.get("preprocessed_video"):
        # Written by EasyVideoR1's offline tool for the record's first video.
        videos = (MediaRef(str(Path(artifacts) / str(record["preprocessed_video"]))), *videos[1:])
    kinds: dict[tuple[bool, bool], DataType] = {
        (False, False): "text",
        (True, False): "image",
        (False, True): "video",
        (True, True): "mixed",
    }
    data_type = kinds[bool(images), bool(videos)]
    declared = record.get("data_type")
    if declared not in (None, "", data_type) and not (declared in ("video", "image") and data_type == "mixed"):
        raise ValueError(f"data_type is {declared!r} but the record holds {data_type} data")
    offline = record.get("offline_output")
    if record.get("has_offline_trajectory") is False:
        offline = None
    if not isinstance(offline, (str, type(None))):
        raise ValueError(f"offline_output is a {type(offline).__name__}, not text")
    options = record.get("options")
    if isinstance(options, str) and options.strip():  # a cell of a table
        try:
            options = json.loads(options)
        except json.JSONDecodeError:
            raise ValueError(f"options is text, not a list: {options[:80]!r}") from None
    return Sample(
        uid=f"{source}:{identifier if identifier not in (None, '') else place}",
        problem=str(record["problem"]),
        answer=clean_answer(record["answer"] if record.get("answer") is not None else record["solution"]),
        problem_type=str(record["problem_type"]),
        data_type=data_type,
        options=tuple(map(str, options if options is not None else ())),
        images=images,
        videos=videos,
        data_source=source,
        offline_output=offline or None,
        extra={key: value for key, value in record.items() if key not in OWN_FIELDS},
    )


def clean_answer(value: Any) -> str:
    """Ground truth without tags; structures become JSON.

    Examples: `<answer>B</answer>` -> `B`; `[2.0, 5.5]` -> `[2.0, 5.5]`; reasoning before the answer is left out.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, str):
        return json.dumps(value)
    tagged = re.findall(r"<answer>(.*?)</answer>", value, flags=re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    thought = re.match(r"\s*<think>(.*?)</think>(.*)", value, flags=re.DOTALL)
    if thought:
        # Some published files carry the answer inside think tags with a broken tag behind.
        rest = re.sub(r"<[^>]*>", "", thought.group(2)).strip()
        return rest or thought.group(1).strip()
    return value.strip()


def gold_fits(sample: Sample) -> bool:
    """Whether the answer of a multiple-choice sample is one of its options (letters or text)."""
    if slug(sample.problem_type) != "multiple_choice" or not sample.options:
        return True
    answer = sample.answer.strip()
    letters = {chr(ord("A") + i) for i in range(len(sample.options))}
    letters |= {m.group(1).upper() for o in sample.options if (m := re.match(r"\s*\(?([A-Za-z])[.):]", o))}
    bare = answer.strip("().: ").upper()
    if bare in letters:
        return True
    texts = {re.sub(r"^\s*\(?[A-Za-z][.):]\s*", "", o).strip().lower() for o in sample.options}
    stripped = re.sub(r"^\s*\(?[A-Za-z][.):]\s*", "", answer).strip().lower()
    return answer in sample.options or stripped in texts


def _media(record: Mapping[str, Any]) -> tuple[tuple[MediaRef, ...], tuple[MediaRef, ...]]:
    images = _as_list(_first(record, "images", "image"))
    videos = _as_list(_first(record, "videos", "video"))
    if not images and not videos and record.get("path"):
        paths = _as_list(record["path"])
        if record.get("data_type") == "image":
            images = paths
        elif record.get("data_type") in ("video", None, ""):
            videos = paths
    refs = [_ref(video) for video in videos]
    start, end = record.get("video_start"), record.get("video_end")
    if len(refs) == 1 and refs[0].start is None and refs[0].end is None and (start is not None or end is not None):
        refs = [replace(refs[0], start=_number(start, "video_start"), end=_number(end, "video_end"))]
    return tuple(_ref(image) for image in images), tuple(refs)


def _first(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, (str, Mapping)):
        return [value]
    return [item for item in value if item not in (None, "")]


def _ref(value: Any) -> MediaRef:
    if isinstance(value, str):
        return MediaRef(path=value)
    if not isinstance(value, Mapping):
        raise ValueError(f"a medium is a path or an object with a path, got {type(value).__name__}")
    path = _first(value, "path", "video", "image")
    if not isinstance(path, str) or not path:
        raise ValueError(f"a medium without a path: {dict(value)}")
    ref = MediaRef(
        path=path,
        start=_number(_first(value, "start", "video_start"), "start"),
        end=_number(_first(value, "end", "video_end"), "end"),
        fps=_number(value.get("fps"), "fps"),
    )
    if ref.start is not None and ref.end is not None and ref.start > ref.end:
        raise ValueError(f"{path}: start={ref.start} lies after end={ref.end}")
    return ref


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number") from None
