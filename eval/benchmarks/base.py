"""The benchmark: reads its files, words its questions, scores answers, computes its figures.

A plain multiple-choice benchmark is `Benchmark` with a YAML file in `conf/benchmark`; a special one overrides
`drafts` (what is asked), `score` (how an answer is judged) or `figures` (what is reported). See
docs/adding-a-benchmark.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datamodules.records import Record
from eval.benchmarks import metrics
from eval.benchmarks.drafts import Draft, gold_of, inline_options
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.prompts import shared_template
from eval.benchmarks.source import Source, fill, lookup
from eval.benchmarks.types import STATES, BenchmarkItem, Cell, Mode, Published, State
from rewards.base import Score

if TYPE_CHECKING:
    from rewards.router import RewardRouter

Figures = tuple[dict[str, float | None], dict[str, dict[str, Cell]]]


@dataclass(frozen=True)
class Judged:
    """One item as the figures of one extraction see it."""

    item: BenchmarkItem
    value: float | None
    """Accuracy in [0, 1]; 0 for a failed item, None for one that was not judged."""
    score: Score | None = None
    response: str = ""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark, described by `conf/benchmark/<name>.yaml`.

    Example: `items, report = loading.load(benchmark, "/data/eval")`, ask the model, `official, robust =
    benchmark.score(item, response, router)`, then `comparison.summarise(benchmark, scored).headline`.
    """

    name: str
    """Name of the YAML file; prefix of the uids."""
    title: str
    """Name in print."""
    category: str
    """general, long, reasoning, stem, spatial, grounding or streaming."""
    sources: Sequence[Source]
    """Published layouts of the annotations; the first whose files are complete is read."""
    expected: Mapping[str, int | None]
    """Split -> official number of questions; null = not published."""
    split: str
    """The split that is evaluated unless another is asked for."""
    scorer: str
    """Name of the official scorer in `rewards.official`."""
    version: str = "1"
    """Changes when questions, prompts or rules change; part of the run key."""
    variant_of: str = ""
    """Benchmark that this is another setting of; "" = one of its own. `benchmark=all` leaves variants out."""
    download: Sequence[str] = ()
    """Hugging Face data sets and addresses that have the files; for `scripts/prepare_benchmarks.py`."""
    problem_type: str = "multiple choice"
    subgroups: Mapping[str, str] = field(default_factory=dict)
    """Table -> field of the record. A field with a list puts the item into each of its groups."""
    rollups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Coarser table -> {of: table, group: [groups of that table], ...}; `_` and blanks in names are one."""
    macro_over: str = ""
    """Table whose groups are averaged without weights into the headline; "" = the mean over all items."""
    macro_groups: Sequence[str] = ()
    """The official groups of that table; one without items counts 0."""
    metric: str = "accuracy"
    """Name of the headline metric."""
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Style -> Jinja text, or -> {problem type: text, default: text}. cot and qwen3vl exist without an entry."""
    system: str | None = None
    """System message of the official prompt."""
    answer_prefix: str = ""
    """How the official prompt begins the assistant's turn."""
    subtitles: str = "none"
    """none, listed (in front of the question) or interleaved (between the frames)."""
    subtitle_files: Sequence[str] = ()
    """Paths of an item's subtitle file below the benchmark's folder, tried in order."""
    frames: Mapping[str, Any] = field(default_factory=dict)
    """`VideoSpec` options of the official frame policy; empty = none is prescribed."""
    published: Sequence[Published] = ()
    notes: str = ""
    """What a reader of the figures has to know."""

    @property
    def follows_frames(self) -> bool:
        """Whether the words of a question depend on which frames are shown."""
        return self.subtitles in ("listed", "interleaved")

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """The questions of a split; one per record unless a benchmark says otherwise."""
        for record in records:
            yield self.draft(record, source, media)

    def draft(self, record: Record, source: Source, media: MediaFinder) -> Draft:
        """A question as the source's field names describe it."""
        question = str(lookup(record, source.question) or "").strip()
        texts = source.option_texts(record)
        if source.options == "inline":
            question, texts = inline_options(question)
        answer, gold_ok = gold_of(lookup(record, source.answer), texts, source.answer_form)
        return Draft(
            uid=f"{self.name}:{fill(source.uid, record)}",
            question=question,
            answer=answer,
            problem_type=self.problem_type,
            texts=texts,
            videos=(source.video(record, media),),
            folder_fps=source.frame_rate(record),
            meta=record,
            gold_ok=gold_ok,
        )

    def template(self, style: str, draft: Draft) -> str:
        """Jinja text of a style: the benchmark's own, else the shared one; qwen3vl's without an official text."""
        own = self.prompts.get(style)
        if isinstance(own, Mapping):
            own = own.get(draft.problem_type, own.get("default"))
        if own is not None:
            return str(own)
        return shared_template("qwen3vl" if style == "official" else style)

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """(official, robust) scores of a response; futures, because a judge or a sandbox takes its time.

        The futures never raise: a record that cannot be scored becomes a score of status "error".
        """
        return submit(self, item, response, router, "official"), submit(self, item, response, router, "robust")

    def state(self, item: BenchmarkItem, official: Score, robust: Score) -> State:
        """The state of an item that got a response."""
        verdict = official if item.needs_judge else robust
        return STATES.get(verdict.status, "not_judged" if item.needs_judge else "failed")

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """(headline metrics, tables) of one extraction: the mean over items or groups, and a table per subgroup."""
        tables = self.subgroup_tables(judged)
        overall = metrics.mean(entry.value for entry in judged).value
        if not self.macro_over:
            return {self.metric: overall}, tables
        value = metrics.macro(tables[self.macro_over], self.macro_groups)
        return {self.metric: value, "micro": overall}, tables

    def subgroup_tables(self, judged: Sequence[Judged]) -> dict[str, dict[str, Cell]]:
        """One table per subgroup whose field the records have."""
        tables = {
            name: metrics.table((lookup(entry.item.meta, path), entry.value) for entry in judged)
            for name, path in self.subgroups.items()
        }
        for name, spec in self.rollups.items():
            path = self.subgroups[str(spec["of"])]
            coarse = {_spelled(m): group for group, members in spec.items() if group != "of" for m in members}
            pairs = ((coarse.get(_spelled(lookup(entry.item.meta, path))), entry.value) for entry in judged)
            tables[name] = metrics.table(pairs)
        return {name: cells for name, cells in tables.items() if cells or name == self.macro_over}


def _spelled(name: Any) -> str:
    return str(name).replace("_", " ").casefold()


def submit(
    benchmark: Benchmark, item: BenchmarkItem, response: str, router: RewardRouter, mode: Mode, **changes: Any
) -> Future[Score]:
    """One score through the router, with everything that is known about the item.

    Official scorers get the response as an inference server hands it on: without a finished thinking block and without
    blanks at its ends (after an answer prefix such as "Answer:" models begin with a blank).

    Args:
        benchmark: names the official scorer.
        item: question, gold and options.
        response: what the model wrote.
        router: the scorer.
        mode: official or robust.
        changes: arguments of `RewardRouter.submit` that differ from the item's.
    """
    sample = item.sample
    fields: dict[str, Any] = {str(key): value for key, value in sample.extra.items()}
    fields |= {"question": fields.get("question", sample.problem), "uid": item.uid}
    arguments: dict[str, Any] = {
        "ground_truth": sample.answer,
        "problem_type": sample.problem_type,
        "options": sample.options,
        "benchmark": benchmark.scorer,
    }
    if mode == "official":
        response = response.rpartition("</think>")[2].strip()
    try:
        return router.submit(response=response, mode=mode, **{**fields, **arguments, **changes})
    except ValueError as error:
        return finished(Score(0.0, 0.0, 0.0, status="error", reason=f"{item.uid}: {error}"))


def finished(score: Score) -> Future[Score]:
    """A future that holds its result."""
    future: Future[Score] = Future()
    future.set_result(score)
    return future
