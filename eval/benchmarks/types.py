"""What benchmarks hand to the pipeline and get back from it: items, load reports, scored items, summaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datamodules.types import Sample
    from rewards.base import Score

State = Literal["ok", "unparsed", "failed", "not_judged"]
"""What became of an item: judged; no answer found; no response or no verdict; a judge is missing."""
STATES: Mapping[str, State] = {"ok": "ok", "unparsable": "unparsed", "not_judged": "not_judged"}
"""Status of a score -> state of its item; any other status is an error of scoring."""
Mode = Literal["official", "robust"]
"""Which reading of a response a number rests on: the benchmark's own scorer, or the careful one of training."""


@dataclass(frozen=True)
class BenchmarkItem:
    """One question of a benchmark, ready to be asked.

    Example: `BenchmarkItem(uid="videomme:001-1", sample=Sample(problem="<video>\\nSelect the best answer ...", ...),
    meta={"duration": "short", ...})`. `sample.problem` is the complete user message: render it as it is, without a
    prompt template, and let `datamodules.prompts.place_media` put the media where `<video>` and `<image>` stand.
    """

    uid: str
    """`<benchmark>:<official id>`; the same in every run, on every machine."""
    sample: Sample
    """Complete user text, lettered options, gold answer, media (absolute paths, start and end for clips)."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Every field of the official record, untouched, plus what the file's place says (task, split)."""
    needs_judge: bool = False
    """Whether the official rules leave the verdict to a language model; without one the item is not judged."""
    system: str | None = None
    """The official system message; None = the chat template's own default."""
    answer_prefix: str = ""
    """Text with which the official prompt begins the assistant's turn ("Best option:("); "" = nothing."""
    frame_options: Mapping[str, Any] = field(default_factory=dict)
    """`VideoSpec` fields of this item on top of the frame policy's (`dataclasses.replace(spec, **frame_options)`)."""
    folder_fps: float | None = None
    """Frames per second of videos that are folders of frames."""
    media_bytes: tuple[int, ...] = ()
    """Size of every video and image when the questions were read, 0 for a missing one: an answer belongs to them."""


@dataclass(frozen=True)
class LoadReport:
    """What was found on disk, compared with what should be there."""

    benchmark: str
    split: str
    source: str
    """`official` or `reference`: whose files were read."""
    files: tuple[str, ...]
    """The annotation files."""
    expected_n: int | None
    """Questions of the split by the official count; None = unknown."""
    n: int
    """Questions loaded."""
    duplicates: tuple[str, ...] = ()
    """Uids that occurred more than once; the later ones carry `#2`, `#3`, so nothing collapses."""
    gold_missing: tuple[str, ...] = ()
    """Uids whose gold answer is absent or none of the options."""
    missing_media: tuple[str, ...] = ()
    """Files that the questions need and that are not there."""
    is_partial: bool = False
    """Fewer questions than the official split, for whatever reason; figures are then not comparable."""
    notes: tuple[str, ...] = ()
    """Everything else worth saying, one sentence each."""


@dataclass(frozen=True)
class ScoredItem:
    """An item together with what became of it.

    Example: a broken video is `ScoredItem(item, "failed")`: no scores, and it counts 0 in every denominator.
    """

    item: BenchmarkItem
    state: State
    official: Score | None = None
    """By the benchmark's own rules; None when there was no response."""
    robust: Score | None = None
    """By the scorer of training; None when there was no response."""
    response: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    value: float | None
    """Percent unless the metric says otherwise; None = nothing in it has been judged."""
    n: int
    """Items in the denominator."""


@dataclass(frozen=True)
class RunInfo:
    """The settings of a run that decide whether its figure may stand beside a published one."""

    style: str = ""
    """Prompt style: official, cot, qwen3vl."""
    frame_policy: str = ""
    """official, qwen3vl, reference."""
    model: str = ""
    """Name of the model as in the published tables, e.g. "Qwen3-VL-8B-Instruct"; "" = unknown."""
    report: LoadReport | None = None


@dataclass(frozen=True)
class Published:
    """A published figure and the settings under which it was obtained."""

    model: str
    metric: str
    """Name of the headline metric it compares with."""
    value: float
    source: str
    certainty: str = "verified"
    """`verified` (read where it was published) or `memory` (never compared with, only listed)."""
    split: str = ""
    """Split it was measured on; "" = the default split."""
    style: str = "qwen3vl"
    """Prompt style it was measured with; "" = not known."""
    frame_policy: str = "qwen3vl"
    """Frame policy it was measured with; "" = not known."""


@dataclass(frozen=True)
class Summary:
    """The figures of one benchmark run.

    Example: `Summary(headline={"accuracy": 71.4}, tables={"duration": {"short": Cell(80.1, 900), ...}}, ...)`.
    """

    benchmark: str
    split: str
    headline: Mapping[str, float | None]
    """Official metrics by name, the first is the headline; read with the official extraction. None = not judged."""
    tables: Mapping[str, Mapping[str, Cell]]
    """Subgroup name -> group -> cell, official extraction."""
    robust_headline: Mapping[str, float | None]
    """The same metrics read with the robust extraction."""
    robust_tables: Mapping[str, Mapping[str, Cell]]
    counts: Mapping[str, int]
    """n_expected, n_items, n_ok, n_failed, n_unparsed, n_not_judged."""
    comparable: bool = False
    """Whether `published` may be printed beside the headline."""
    reason: str = ""
    """Why not, in words; "" when it may."""
    published: Published | None = None
    """The figure to compare with, where there is one for this model."""
    is_partial: bool = False
    notes: tuple[str, ...] = ()

    @property
    def disagreement(self) -> dict[str, tuple[float | None, float | None]]:
        """Metrics on which the two extractions differ: name -> (official, robust)."""
        both = {name: (value, self.robust_headline.get(name)) for name, value in self.headline.items()}
        return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class FileStatus:
    """Which annotation files of one split lie on this disk."""

    split: str
    expected_n: int | None
    source: str | None
    """The source that would be read; None = none is complete."""
    found: tuple[str, ...]
    missing: tuple[str, ...]
    """Files of the official source that are not there, relative to the data root."""

    @property
    def ready(self) -> bool:
        """Whether the split can be loaded."""
        return self.source is not None
