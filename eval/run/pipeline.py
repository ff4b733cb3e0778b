"""Ask a model all items at once: prepare in processes, generate as soon as something is ready, write as it comes.

    pool (processes, deadline per item) -> bounded by bytes -> driver (in-flight limit, deadline) -> writer, scorer

Every item ends in the answers, with a response or with a reason. Only what an engine could not be asked, because no
engine was left, stays open for the next run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.seeds import response_seed
from eval.run.pool import PreparePool, Task
from eval.run.prepare import ReadyItem, media_key
from rollout.types import GenerateRequest, SamplingSpec

if TYPE_CHECKING:
    from eval.benchmarks.types import BenchmarkItem
    from eval.engine.generate import Driver, Outcome
    from eval.run.records import RecordLog

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 30.0
ANSWERED, FAILED = "answered", "failed"


@dataclass
class PipelineStats:
    """What one run of the pipeline took."""

    items: int = 0
    answered: int = 0
    failed: int = 0
    seconds: float = 0.0
    prepare_busy_s: float = 0.0
    """Sum over the preparation processes."""
    idle_share: float = 0.0
    """Share of the time in which the engine had nothing to do."""
    peak_bytes: int = 0
    """Most prepared bytes held at one time."""
    killed: int = 0
    """Preparation processes stopped at their deadline."""
    engine_restarts: int = 0
    unanswered: dict[str, str] = field(default_factory=dict)
    """uid -> reason of items that no engine could be asked; a later run asks them."""


def item_digest(item: BenchmarkItem) -> str:
    """Short hash of what the model is shown; an answer to another question, or about other media, is not resumed."""
    sample = item.sample
    media = [{**asdict(ref), "path": Path(ref.path).name} for ref in (*sample.videos, *sample.images)]
    shown = [sample.problem, media, item.media_bytes, item.system, item.answer_prefix]
    frames = {**item.frame_options, "folder_fps": item.folder_fps}
    return hashlib.sha256(json.dumps([shown, frames], default=str).encode()).hexdigest()[:12]


def fits(item: BenchmarkItem, answer: Mapping[str, Any] | None) -> bool:
    """Whether an answer is one to this question as it is asked now."""
    return answer is not None and answer.get("state") in (ANSWERED, FAILED) and answer.get("item") == item_digest(item)


def open_items(
    items: Sequence[BenchmarkItem], answers: Mapping[str, Mapping[str, Any]], retry_failed: bool = False
) -> list[BenchmarkItem]:
    """Items without a fitting answer, in order."""
    return [
        item
        for item in items
        if not fits(item, answers.get(item.uid)) or (retry_failed and answers[item.uid]["state"] == FAILED)
    ]


def ask(
    items: Sequence[BenchmarkItem],
    pool: PreparePool,
    driver: Driver,
    sampling: SamplingSpec,
    answers: RecordLog,
    seed: int = 0,
    on_answers: Callable[[list[tuple[BenchmarkItem, dict[str, Any]]]], None] | None = None,
    frames_dir: Path | None = None,
) -> PipelineStats:
    """Ask every item of `items`; afterwards each is in `answers` or in the result's `unanswered`.

    Args:
        items: unique uids.
        pool: prepares a `BenchmarkItem` into a `ReadyItem`.
        driver: generates.
        sampling: how the one response per item is drawn.
        answers: receives one record per item, on disk before the next one is believed.
        seed: of the responses when the temperature is not 0.
        on_answers: called with what was just written, from the writer's thread (scoring).
        frames_dir: receives the items' thumbnails; None = they are dropped.

    Raises:
        RuntimeError: preparation or the engine cannot start; what `on_answers` raised.
    """
    started = time.monotonic()
    stats = PipelineStats(items=len(items))
    by_uid = {item.uid: item for item in items}
    if len(by_uid) != len(items):
        raise ValueError("two items have the same uid")
    writer = _Writer(by_uid, answers, stats, on_answers, frames_dir)
    stream = _requests(items, pool, sampling, seed, writer)
    try:
        for outcome in driver.run(stream):
            pool.release(outcome.request.request_id)
            writer.take(outcome)
    finally:
        pool.close()
        writer.finish()
    stats.seconds = time.monotonic() - started
    stats.prepare_busy_s, stats.killed = pool.stats.busy_s, pool.stats.killed
    stats.peak_bytes = pool.peak_bytes
    stats.idle_share, stats.engine_restarts = driver.stats.idle_share, driver.stats.restarts
    writer.check()
    return stats


def _requests(
    items: Sequence[BenchmarkItem], pool: PreparePool, sampling: SamplingSpec, seed: int, writer: _Writer
) -> Iterator[GenerateRequest | None]:
    """Requests as their items get ready; what cannot be prepared goes to the writer."""
    by_uid = {item.uid: item for item in items}
    tasks = (Task(item.uid, item, media_key(item)) for item in items)
    for outcome in pool.run(tasks):
        if outcome is None:
            yield None
        elif outcome.reason:
            # A process that was stopped or died could not say which file it was.
            sample, reason = by_uid[outcome.key].sample, outcome.reason
            paths = list(dict.fromkeys(ref.path for ref in (*sample.videos, *sample.images)))
            if paths and not any(Path(path).name in reason for path in paths):
                reason = f"{', '.join(paths)}: {reason}"
            writer.put({"uid": outcome.key, "state": FAILED, "reason": reason})
        else:
            ready: ReadyItem = outcome.value
            writer.ready(outcome.key, ready)
            request_seed = response_seed(seed, 0, outcome.key, 0)
            yield GenerateRequest(outcome.key, ready.prompt, sampling, request_seed)


class _Writer:
    """Writes answers in a thread of its own, so that the disk never holds up the engine."""

    def __init__(
        self,
        by_uid: Mapping[str, BenchmarkItem],
        answers: RecordLog,
        stats: PipelineStats,
        on_answers: Callable[[list[tuple[BenchmarkItem, dict[str, Any]]]], None] | None,
        frames_dir: Path | None,
    ) -> None:
        self._by_uid, self._answers, self._stats = by_uid, answers, stats
        self._on_answers, self._frames_dir = on_answers, frames_dir
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._about: dict[str, dict[str, Any]] = {}
        self._error: BaseException | None = None
        self._said = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="answer-writer", daemon=True)
        self._thread.start()

    def ready(self, uid: str, item: ReadyItem) -> None:
        """Remember what an item looked like until its outcome."""
        about = {"prompt": item.prompt.prompt_text, "prompt_tokens": item.prompt.num_prompt_tokens}
        about |= {"frames": item.num_frames, "thumbnail": self._save(uid, item.thumbnail)}
        self._about[uid] = about

    def _save(self, uid: str, data: bytes) -> str:
        """Write a thumbnail; its file name, or "" when there is none."""
        if self._frames_dir is None or not data:
            return ""
        path = self._frames_dir / (hashlib.sha256(uid.encode()).hexdigest()[:16] + ".jpg")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:  # a picture in the report is not worth a result
            log.warning("cannot write %s (%s): the report shows no more pictures", path, error.strerror)
            path.unlink(missing_ok=True)
            self._frames_dir = None
            return ""
        return path.name

    def take(self, outcome: Outcome) -> None:
        """Turn an outcome into a record."""
        uid = outcome.request.request_id
        about = self._about.pop(uid, {})
        if not outcome.is_final:
            self._stats.unanswered[uid] = outcome.reason
            return
        record = {"uid": uid, **about, "seconds": round(outcome.seconds, 3)}
        if outcome.response is None:
            record |= {"state": FAILED, "reason": outcome.reason}
        else:
            response = outcome.response
            record |= {"state": ANSWERED, "response": response.text, "num_tokens": len(response.token_ids)}
            record |= {"finish_reason": response.finish_reason}
        self.put(record)

    def put(self, record: dict[str, Any]) -> None:
        """Queue a record."""
        self._queue.put(record)

    def finish(self) -> None:
        """Wait until everything is written (or known to be unwritable)."""
        self._queue.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        is_open = True
        while is_open:
            chunk = [self._queue.get()]
            while not self._queue.empty():
                chunk.append(self._queue.get())
            is_open = None not in chunk
            try:
                self._write([record for record in chunk if record is not None])
            except Exception as error:  # noqa: BLE001 - kept for the caller; the remaining answers are still written
                log.error("evaluation: %s: %s", type(error).__name__, error)
                self._error = self._error or error

    def _write(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            record["item"] = item_digest(self._by_uid[record["uid"]])
            if record["state"] == FAILED:
                self._stats.failed += 1
                log.warning("evaluation: %s failed: %s", record["uid"], record["reason"])
            else:
                self._stats.answered += 1
        if records:
            self._answers.append(*records)
            if self._on_answers is not None:
                self._on_answers([(self._by_uid[record["uid"]], record) for record in records])
        if time.monotonic() - self._said > PROGRESS_SECONDS:
            self._said = time.monotonic()
            done = self._stats.answered + self._stats.failed
            log.info("evaluation: %d of %d items, %d failed", done, self._stats.items, self._stats.failed)
