"""OVO-Bench: questions about the past, the present and the future of a stream (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datamodules.types import MediaRef
from eval.benchmarks import loading, metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.drafts import LETTERS, Draft
from eval.benchmarks.readers import Record
from eval.benchmarks.source import Source, fill


@dataclass(frozen=True, kw_only=True)
class OVOBench(Benchmark):
    """Twelve tasks in three categories; the total is the mean of the categories' means.

    An entry of the forward tasks is asked at several times; each becomes one item. Videos end at the time of the
    query: cut exactly from the source video, or the ready-made chunk where only that is there.
    """

    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Category -> its tasks."""

    def drafts(self, records: Iterable[Record], source: Source, media: loading.MediaFinder) -> Iterable[Draft]:
        """One per entry of the backward and real-time tasks, one per query of the forward tasks."""
        for record in records:
            if source.name != "official":
                yield self._reference_draft(record, source, media)
                continue
            queries = record.get("test_info")
            if not queries:
                yield self._choice_draft(record, source, media)
                continue
            for index, query in enumerate(queries):
                rest = {key: value for key, value in record.items() if key != "test_info"}
                yield self._forward_draft({**rest, **query, "test_index": index}, source, media)

    def _reference_draft(self, record: Record, source: Source, media: loading.MediaFinder) -> Draft:
        draft = loading.plain_draft(self, record, source, media)
        task = str(record["ovo_task"])
        meta = {**record, "task": task, "category": self._category(task)}
        kind = record["problem_type"] if task in ("REC", "SSR", "CRR") else self.problem_type
        return replace(draft, problem_type=kind, meta=meta)

    def _choice_draft(self, record: Record, source: Source, media: loading.MediaFinder) -> Draft:
        texts = tuple(str(option) for option in record["options"])
        gold = record.get("gt")
        known = isinstance(gold, int) and 0 <= gold < len(texts)
        return Draft(
            uid=f"{self.name}:{fill(source.uid, record)}",
            question=str(record["question"]),
            answer=LETTERS[gold] if known else "",
            problem_type=self.problem_type,
            texts=texts,
            videos=(_until(record, f"{record['id']}.mp4", source, media),),
            meta={**record, "category": self._category(record["task"])},
            gold_ok=known,
        )

    def _forward_draft(self, record: Record, source: Source, media: loading.MediaFinder) -> Draft:
        task, index = str(record["task"]), record["test_index"]
        if task == "REC":
            question, answer = f"How many times did they {record['activity']}?", str(record["count"])
        else:
            question = str(record["step"] if task == "SSR" else record["question"])
            answer = "Yes" if record["type"] else "No"
        return Draft(
            uid=f"{self.name}:{fill(source.uid, record)}_{index}",
            question=question,
            answer=answer,
            problem_type=task,
            videos=(_until(record, f"{record['id']}_{index}.mp4", source, media),),
            meta={**record, "category": self._category(task)},
        )

    def _category(self, task: str) -> str:
        return next((name for name, tasks in self.categories.items() if task in tasks), "")

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`total` and the three categories: each the mean of its tasks' accuracies."""
        tables = self.subgroup_tables(judged)
        means = metrics.category_means(tables.get("task", {}), self.categories)
        micro = metrics.mean(entry.value for entry in judged).value
        return {"total": means.pop("total"), **means, "micro": micro}, tables


def _until(record: Mapping[str, Any], chunk: str, source: Source, media: loading.MediaFinder) -> MediaRef:
    """The source video up to the time of the query; without it the chunk that is cut there already."""
    whole = [path for pattern in source.media if (path := fill(pattern, record))]
    if not any(media.find(path) for path in whole):
        for folder in ("chunked_videos/", ""):
            if found := media.find(folder + chunk):
                return MediaRef(str(found))
    return MediaRef(media.place(whole), None, float(record["realtime"]))
