"""Slices of benchmarks during training, through the training's own engine: the lock-step driver, on all ranks.

Same loading, preparation, scoring and aggregation as `evaluate.py`; only generation differs, because the ranks that
share an engine must ask the same number of times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from datamodules.common.seeds import response_seed
from datamodules.video.service import DecodeService
from eval.benchmarks import catalogue
from eval.benchmarks.base import Benchmark
from eval.benchmarks.comparison import summarise
from eval.benchmarks.loading import load
from eval.benchmarks.types import BenchmarkItem, LoadReport, RunInfo, Summary
from eval.heldout import generate_tolerantly
from eval.report.write import scalars
from eval.run.pipeline import ANSWERED, FAILED
from eval.run.prepare import ItemPreparer, PrepareSettings, ReadyItem
from eval.run.records import MemoryLog
from eval.run.scoring import Scorer, scored_items
from rewards.router import RewardRouter
from rollout.types import GenerateFn, GenerateRequest, SamplingSpec

if TYPE_CHECKING:
    from datamodules.video.spec import MediaFamily

log = logging.getLogger(__name__)

Record = dict[str, Any]


class BenchmarkSlices:
    """A few items of some benchmarks, evenly spaced over their files, asked every now and then.

    The first items would often be of one task only, and the mean over tasks would mean nothing.

    Args:
        benchmarks: names, or "all".
        data_root: folder with one folder per benchmark.
        model_path: the model whose processor the training uses.
        family: its family.
        limit: items per benchmark; None = all.
        batch_size: items per call of the engine and rank.
        style: prompt style.
        frame_policy: official, qwen3vl or reference.
        frames: `VideoSpec` options on top of the policy.
        max_prompt_tokens: longer prompts fail.
        cache_dir: where decoded clips are kept.
        decode_timeout_s: seconds for one clip.
        available_only: leave out items whose media are missing.
    """

    def __init__(
        self,
        benchmarks: Sequence[str] | str,
        data_root: str,
        model_path: str,
        family: MediaFamily,
        limit: int | None = 64,
        batch_size: int = 16,
        style: str = "official",
        frame_policy: str = "official",
        frames: Mapping[str, float | None] | None = None,
        max_prompt_tokens: int | None = None,
        cache_dir: str | None = None,
        decode_timeout_s: float = 120.0,
        available_only: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: at least one item of a benchmark, or null for all")
        self.benchmarks = [catalogue.get(name) for name in catalogue.select(benchmarks)]
        self._data_root, self._limit, self._batch_size = data_root, limit, batch_size
        self._style, self._frame_policy, self._available_only = style, frame_policy, available_only
        self._frames = {key: value for key, value in (frames or {}).items() if value is not None}
        self._settings = PrepareSettings(
            model_path=model_path,
            family=family,
            frame_policy=frame_policy,
            frame_overrides=self._frames,
            max_prompt_tokens=max_prompt_tokens,
            cache_dir=cache_dir,
        )
        self._timeout_s = decode_timeout_s
        self._loaded: dict[str, tuple[list[BenchmarkItem], LoadReport]] = {}

    def load(self) -> None:
        """Read the benchmarks' files, once.

        Raises:
            ValueError: they are missing or do not fit.
        """
        for benchmark in self.benchmarks:
            self._load(benchmark)

    def evaluate(
        self,
        generate: GenerateFn,
        router: RewardRouter,
        sampling: SamplingSpec,
        rank: int = 0,
        world: int = 1,
        gather: Callable[[list[Record]], list[Record]] | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> list[tuple[Summary, list[Record]]]:
        """(summary, records) per benchmark, equal on all ranks; a collective.

        Args:
            generate: the engine; every rank calls it equally often.
            router: the scorer.
            sampling: how the one response per item is drawn.
            rank: this rank.
            world: number of ranks.
            gather: merges the ranks' records; None for one rank.
            seed: of the responses when the temperature is not 0.
            timeout_s: seconds to wait for verdicts at the end of a benchmark.
        """
        found = []
        with closing(DecodeService(self._timeout_s)) as decoder:
            for benchmark in self.benchmarks:
                items, report = self._load(benchmark)
                answers, scores = MemoryLog(), MemoryLog()
                scorer = Scorer(benchmark, router, scores, timeout_s)
                preparer = self._settings_of(benchmark)()
                preparer.cache.decode_clip = decoder
                own = [
                    items[start + rank * self._batch_size : start + (rank + 1) * self._batch_size]
                    for start in range(0, len(items), self._batch_size * world)
                ]
                for batch, ready in _prepared(preparer, own):
                    records = _answer(batch, ready, generate, sampling, seed)
                    answers.append(*records.values())
                    scorer.submit([(item, records[item.uid]) for item in batch])
                scorer.finish()
                rows = [
                    {**scores.records[uid], "response": a.get("response", "")} for uid, a in answers.records.items()
                ]
                merged = {row["uid"]: row for row in (gather(rows) if gather else rows)}
                scored = scored_items(items, merged, merged)
                info = RunInfo(self._style, "custom" if self._frames else self._frame_policy, "", report)
                found.append((summarise(benchmark, scored, info), [merged[i.uid] for i in items if i.uid in merged]))
        return found

    def _load(self, benchmark: Benchmark) -> tuple[list[BenchmarkItem], LoadReport]:
        if benchmark.name not in self._loaded:
            settings = self._settings_of(benchmark)
            items, report = load(
                benchmark,
                self._data_root,
                self._style,
                self._frame_policy,
                available_only=self._available_only,
                video_spec=settings.model_video_spec() if benchmark.follows_frames else None,
            )
            chosen = evenly_spaced(items, self._limit)
            if len(chosen) < len(items):
                report = replace(report, n=len(chosen), is_partial=True)
            self._loaded[benchmark.name] = chosen, report
        return self._loaded[benchmark.name]

    def _settings_of(self, benchmark: Benchmark) -> PrepareSettings:
        return replace(self._settings, benchmark_frames=dict(benchmark.frames))


def evenly_spaced(items: Sequence[BenchmarkItem], limit: int | None) -> list[BenchmarkItem]:
    """`limit` of the items in their order, from the first on; all when there are no more.

    Example: of items 0 to 9, three are 0, 3 and 6.
    """
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _prepared(
    preparer: ItemPreparer, batches: Sequence[Sequence[BenchmarkItem]]
) -> Iterator[tuple[Sequence[BenchmarkItem], list[ReadyItem | str]]]:
    """Batches with their prepared items (or the reason of a failure); the next one is prepared while one generates."""

    def prepare(item: BenchmarkItem) -> ReadyItem | str:
        try:
            return preparer(item)
        except Exception as error:  # noqa: BLE001 - user media: whatever they do to a decoder becomes the item's state
            return str(error) or type(error).__name__

    with ThreadPoolExecutor(1, thread_name_prefix="slice-prepare") as pool:
        ready = [pool.submit(prepare, item) for item in batches[0]] if batches else []
        for i, batch in enumerate(batches):
            outcomes = [future.result() for future in ready]
            if i + 1 < len(batches):
                ready = [pool.submit(prepare, item) for item in batches[i + 1]]
            yield batch, outcomes


def _answer(
    batch: Sequence[BenchmarkItem],
    ready: Sequence[ReadyItem | str],
    generate: GenerateFn,
    sampling: SamplingSpec,
    seed: int,
) -> dict[str, Record]:
    """One answer record per item of a batch; the engine is called also when nothing could be prepared."""
    records: dict[str, Record] = {}
    requests = []
    for item, outcome in zip(batch, ready, strict=True):
        if isinstance(outcome, str):
            records[item.uid] = {"uid": item.uid, "state": FAILED, "reason": outcome}
        else:
            requests.append(
                GenerateRequest(f"slice:{item.uid}", outcome.prompt, sampling, response_seed(seed, 0, item.uid, 0))
            )
    uids = {request.request_id: request.request_id.removeprefix("slice:") for request in requests}
    reasons: dict[str, str] = {}
    for request, response in generate_tolerantly(requests, generate, reasons):
        uid = uids[request.request_id]
        records[uid] = {"uid": uid, "state": ANSWERED, "response": response.text, "num_tokens": len(response.token_ids)}
    for request_id, reason in reasons.items():
        records[uids[request_id]] = {"uid": uids[request_id], "state": FAILED, "reason": reason}
    return records


def slice_metrics(results: Sequence[tuple[Summary, list[Record]]]) -> dict[str, float]:
    """Scalars for the loggers: headline per benchmark, counts, and the mean of the headlines (all in percent)."""
    found: dict[str, float] = {}
    heads = []
    for summary, _ in results:
        found |= scalars(asdict(summary))
        heads.append(next(iter(summary.headline.values()), None))
    judged = [value for value in heads if value is not None]
    if judged:
        found["eval/mean"] = sum(judged) / len(judged)
    return found
