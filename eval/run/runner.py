"""One benchmark, one model, one folder: prepare, infer, score, aggregate, with files between the stages.

<output_dir>/<model>/<benchmark>-<run key>/
    run.json         settings, what was found on disk                      (prepare)
    items.jsonl      questions as the model is asked them                  (prepare)
    answers.jsonl    one line per asked item, append-only                  (infer)
    scores.jsonl     official and robust verdict per answer, append-only   (score)
    result.json      figures, counts, comparability                        (aggregate)
    frames/          small pictures for the report
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datamodules.common.files import FolderLock, write_json, write_lines
from datamodules.types import MediaRef, Sample
from eval.benchmarks.comparison import summarise
from eval.benchmarks.loading import load
from eval.benchmarks.prompts import shared_template
from eval.benchmarks.types import BenchmarkItem, LoadReport, RunInfo
from eval.engine.errors import EngineLostError
from eval.run.pipeline import PipelineStats, ask, fits, open_items
from eval.run.pool import PreparePool
from eval.run.records import RecordLog, read_records, run_key
from eval.run.scoring import Scorer, answer_digest, scored_items, unscored

if TYPE_CHECKING:
    from eval.benchmarks.base import Benchmark
    from eval.engine.generate import Driver
    from eval.run.prepare import PrepareSettings
    from rewards.router import RewardRouter
    from rollout.types import SamplingSpec

log = logging.getLogger(__name__)

Stage = Literal["all", "prepare", "infer", "score", "aggregate"]
STAGES = ("all", "prepare", "infer", "score", "aggregate")


@dataclass(frozen=True)
class RunOptions:
    """Settings of an evaluation that hold for all its benchmarks."""

    output_dir: str
    """Runs lie in `<output_dir>/<model name>/`."""
    data_root: str
    """Folder with one folder per benchmark, as downloaded."""
    model_name: str
    """As in published tables; also names the folder."""
    model_id: str
    """Hash of the model's content (`eval.run.records.model_identity`)."""
    sampling: SamplingSpec
    engine_key: Mapping[str, Any] = field(default_factory=dict)
    """Engine settings that may change answers: dtype, max_model_len, further options."""
    style: str = "official"
    """Prompt style: official, cot, qwen3vl."""
    split: str | None = None
    """None = the benchmark's default."""
    source: str | None = None
    """official or reference annotation files; None = what is there."""
    limit: int | None = None
    """Only the first so many items; the run is then partial."""
    available_only: bool = False
    """Leave out items whose media are missing; the run is then partial."""
    seed: int = 0
    retry_failed: bool = False
    """Ask failed items again."""
    processes: int = 4
    """Preparation processes."""
    prepare_deadline_s: float = 300.0
    max_bytes: int = 8 << 30
    """Prepared frames held at one time."""
    score_timeout_s: float = 600.0


class BenchmarkRun:
    """All stages of one benchmark on one model.

    Args:
        benchmark: the benchmark.
        options: settings of the evaluation.
        prepare: how items are shown to the model.

    Raises:
        ValueError: an option makes no sense.

    Example: `BenchmarkRun(benchmark, options, prepare).run(make_driver, router)["headline"]`.
    """

    def __init__(self, benchmark: Benchmark, options: RunOptions, prepare: PrepareSettings) -> None:
        if options.limit is not None and not (isinstance(options.limit, int) and options.limit > 0):
            raise ValueError(f"limit={options.limit}: a number of items is expected, or null for all")
        if options.style not in ("official", *benchmark.prompts):
            shared_template(options.style)
        self.benchmark, self.options, self.settings = benchmark, options, prepare
        self.key_fields = self._key_fields()
        self.key = run_key(self.key_fields)
        name = f"{benchmark.name}-{self.key}"
        self.folder = Path(options.output_dir) / options.model_name / name
        self.problem = ""
        """Which file could not be written, and why; its records are in memory."""
        self._unwritten: dict[str, Mapping[str, dict[str, Any]]] = {}

    def run(self, make_driver: Callable[[], Driver], router: RewardRouter, stage: Stage = "all") -> dict[str, Any]:
        """Run a stage, or all of them; returns the result (empty for `prepare` and `infer`).

        Args:
            make_driver: called when there is something to ask.
            router: scorer.
            stage: `score` needs no model, `aggregate` neither model nor router.

        When the disk gets full after `prepare`, the result rests on what is in memory and its "problem" names the file.

        Raises:
            FolderInUse: another evaluation writes to the folder.
            EngineLostError: the stage `infer` could not ask every item; a result would count them.
            OSError: a file cannot be written and there is no result to tell it with.
            ValueError: the benchmark's files are missing or do not fit, or an earlier stage has not been run.
        """
        with FolderLock(self.folder):
            if stage in ("all", "prepare"):
                self.prepare()
            items = self.items()
            if stage in ("all", "infer"):
                stats = self.infer(items, make_driver, router)
                if stage == "infer" and stats is not None and stats.unanswered:
                    raise EngineLostError(f"{len(stats.unanswered)} items could not be asked, the engine is gone")
            if stage == "score":
                self.score(items, router, again=True)
            result = self.aggregate(items) if stage in ("all", "score", "aggregate") else {}
            if self.problem and not result:
                raise OSError(self.problem)
            return result

    def prepare(self) -> None:
        """Read the benchmark's files; write `items.jsonl` and `run.json`."""
        options = self.options
        items, report = load(
            self.benchmark,
            options.data_root,
            options.style,
            self.settings.frame_policy,
            options.split,
            options.limit,
            options.source,
            options.available_only,
            self.settings.model_video_spec() if self.benchmark.follows_frames else None,
        )
        if not items:
            raise ValueError(f"{self.benchmark.name}: no item to evaluate below data_root={options.data_root}")
        for line in _report_lines(report):
            log.info("%s", line)
        write_lines(self.folder / "items.jsonl", (_jsonable(asdict(item)) for item in items))
        run: dict[str, Any] = {"benchmark": self.benchmark.name, "title": self.benchmark.title, "key": self.key}
        run |= {"settings": self.key_fields, "model": options.model_name, "report": asdict(report)}
        write_json(self.folder / "run.json", run)

    def items(self) -> list[BenchmarkItem]:
        """What `prepare` wrote.

        Raises:
            ValueError: it has not run with these settings, or its file is damaged.
        """
        path = self.folder / "items.jsonl"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: run the stage prepare first, with the settings of this run (another model, "
                "style, frame policy, sampling or seed is another run)"
            )
        records = read_records(path)
        expected = _read_json(self.folder / "run.json")["report"]["n"]
        if len(records) != expected:
            raise ValueError(
                f"{path} holds {len(records)} of {expected} questions: it is damaged, run the stage prepare"
            )
        items = []
        for record in records.values():
            sample = _tupled(record["sample"])
            sample |= {name: tuple(MediaRef(**ref) for ref in sample[name]) for name in ("images", "videos")}
            items.append(BenchmarkItem(**{**_tupled(record), "sample": Sample(**sample)}))
        return items

    def infer(
        self, items: Sequence[BenchmarkItem], make_driver: Callable[[], Driver], router: RewardRouter
    ) -> PipelineStats | None:
        """Ask what has no answer yet, scoring on the way; None when nothing was open."""
        answers, scores = self._open("answers"), self._open("scores")
        try:
            scorer = Scorer(self.benchmark, router, scores, self.options.score_timeout_s)
            scorer.submit(unscored(items, _fitting(items, answers.records), scores.records))
            missing = open_items(items, answers.records, self.options.retry_failed)
            log.info("%s: %d items, %d to ask", self.benchmark.name, len(items), len(missing))
            stats = None
            if missing:
                stats = self._ask(missing, make_driver, answers, scorer)
            scorer.finish()
        finally:
            self._close(answers, scores)
        if stats is not None:
            self._write("stats.json", asdict(stats))
        return stats

    def _ask(
        self,
        missing: Sequence[BenchmarkItem],
        make_driver: Callable[[], Driver],
        answers: RecordLog,
        scorer: Scorer,
    ) -> PipelineStats:
        options = self.options
        pool = PreparePool(self.settings, options.processes, options.prepare_deadline_s, options.max_bytes)
        try:
            pool.start(len(missing))  # while the engine loads
            driver = make_driver()
        except BaseException:  # also Ctrl-C: the pool's processes must not outlive the start
            pool.close()
            raise
        stats = ask(
            missing,
            pool,
            driver,
            options.sampling,
            answers,
            seed=options.seed,
            on_answers=scorer.submit,
            frames_dir=self.folder / "frames",
        )
        log.info(
            "%s: %d answered and %d failed in %.1f s; engine idle %.0f %%, preparation %.1f s in %d processes",
            self.benchmark.name,
            stats.answered,
            stats.failed,
            stats.seconds,
            100 * stats.idle_share,
            stats.prepare_busy_s,
            options.processes,
        )
        if stats.unanswered:
            log.error("%s: %d items could not be asked, the engine is gone", self.benchmark.name, len(stats.unanswered))
        return stats

    def score(self, items: Sequence[BenchmarkItem], router: RewardRouter, again: bool = False) -> None:
        """Score answers without a model; `again` also those that have a score."""
        if again:
            (self.folder / "scores.jsonl").unlink(missing_ok=True)
        answers, scores = _fitting(items, read_records(self.folder / "answers.jsonl")), self._open("scores")
        try:
            scorer = Scorer(self.benchmark, router, scores, self.options.score_timeout_s)
            scorer.submit(unscored(items, answers, scores.records))
            scorer.finish()
        finally:
            self._close(scores)

    def aggregate(self, items: Sequence[BenchmarkItem]) -> dict[str, Any]:
        """Compute all figures and write `result.json`."""
        run = _read_json(self.folder / "run.json")
        # Records of a question or of media as they were before do not count.
        answers, verdicts = _fitting(items, self._records("answers")), self._records("scores")
        scores = {
            uid: verdicts[uid]
            for uid, answer in answers.items()
            if uid in verdicts and verdicts[uid].get("answer") == answer_digest(answer)
        }
        scored = scored_items(items, answers, scores)
        report = LoadReport(**_tupled(run["report"]))
        info = RunInfo(
            style=self.options.style,
            frame_policy="custom" if self.settings.is_custom else self.settings.frame_policy,
            model=self.options.model_name,
            report=report,
        )
        summary = summarise(self.benchmark, scored, info)
        unasked = sum(item.uid not in scores for item in items)
        result = asdict(summary) | {
            "disagreement": {name: list(pair) for name, pair in summary.disagreement.items()},
            "title": self.benchmark.title,
            "category": self.benchmark.category,
            "model": self.options.model_name,
            "key": self.key,
            "folder": str(self.folder),
            "unasked": unasked,
            "is_partial": summary.is_partial or unasked > 0,
            "settings": self.key_fields,
        }
        if unasked:
            result |= {"comparable": False, "reason": f"{unasked} items have not been asked"}
        if (self.folder / "stats.json").is_file():
            result["stats"] = _read_json(self.folder / "stats.json")
        result["written"] = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._write("result.json", result)
        return result | ({"problem": self.problem} if self.problem else {})

    def _open(self, name: str) -> RecordLog:
        return RecordLog(self.folder / f"{name}.jsonl")

    def _close(self, *logs: RecordLog) -> None:
        """Close record files; what the disk did not take is kept for the figures of this process."""
        for record_log in logs:
            record_log.close()
            if record_log.problem:
                self._unwritten[record_log.path.stem] = record_log.records
                self._note(record_log.problem)

    def _records(self, name: str) -> Mapping[str, dict[str, Any]]:
        return self._unwritten.get(name) or read_records(self.folder / f"{name}.jsonl")

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            write_json(self.folder / name, value)
        except OSError as error:
            self._note(f"{error.filename}: {error.strerror}")

    def _note(self, problem: str) -> None:
        log.error("%s: cannot write %s", self.benchmark.name, problem)
        self.problem = self.problem or f"not everything could be written: {problem}; free space and run again"

    def _key_fields(self) -> dict[str, Any]:
        options, benchmark = self.options, self.benchmark
        sampling = asdict(options.sampling)
        for derived in ("n", "banned_ids", "stop_ids"):
            sampling.pop(derived)
        return {
            "model": options.model_id,
            "benchmark": [benchmark.name, benchmark.version, options.split or benchmark.split, options.source],
            "style": options.style,
            "frame_policy": self.settings.frame_policy,
            **self.settings.key(),
            "sampling": sampling,
            "seed": options.seed,
            "engine": dict(options.engine_key),
        }


def _fitting(items: Sequence[BenchmarkItem], answers: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Answers to the items as they are asked now."""
    return {item.uid: answers[item.uid] for item in items if fits(item, answers.get(item.uid))}


def _tupled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass of ours as they were before JSON made lists of its tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def _jsonable(value: Any) -> Any:
    """Plain JSON values; what an annotation file holds besides (arrays, bytes, dates) becomes lists and text."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_jsonable(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: run the earlier stages first")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): run the earlier stages again") from error


def _report_lines(report: LoadReport) -> list[str]:
    """What was found on disk, in words."""
    expected = "unknown" if report.expected_n is None else report.expected_n
    lines = [f"{report.benchmark}: {report.n} items ({report.source}, split {report.split}), expected {expected}"]
    for name in ("duplicates", "gold_missing", "missing_media"):
        if found := getattr(report, name):
            shown = ", ".join(found[:3]) + (" ..." if len(found) > 3 else "")
            lines.append(f"  {len(found)} {name.replace('_', ' ')}: {shown}")
    return lines + [f"  {note}" for note in report.notes]
