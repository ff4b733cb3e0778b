"""OVO-Bench: questions about the past, the present and the future of a stream (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from datamodules.records import Record
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.drafts import Draft
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source, fill


@dataclass(frozen=True, kw_only=True)
class OVOBench(Benchmark):
    """Twelve tasks in three categories; the total is the mean of the categories' means.

    An entry of the forward tasks is asked at several times; each becomes one item. Videos end at the time of the
    query: cut exactly from the source video, or the ready-made chunk where only that is there.
    """

    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Category -> its tasks."""

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """One per entry of the backward and real-time tasks, one per query of the forward tasks."""
        for record in records:
            task = str(record["ovo_task" if "ovo_task" in record else "task"])
            category = next((name for name, tasks in self.categories.items() if task in tasks), "")
            record |= {"task": task, "category": category}
            queries = record.pop("test_info", None)
            if source.name != "official":
                kind = record["problem_type"] if task in ("REC", "SSR", "CRR") else self.problem_type
                yield replace(self.draft(record, source, media), problem_type=kind)
            elif queries:
                for index, query in enumerate(queries):
                    yield self._forward_draft({**record, **query, "test_index": index}, source, media)
            else:
                draft = self.draft(_cut(record, record["id"]), source, media)
                yield replace(draft, answer=draft.answer if draft.gold_ok else "", meta=record)

    def _forward_draft(self, record: Record, source: Source, media: MediaFinder) -> Draft:
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
            videos=(source.video(_cut(record, f"{record['id']}_{index}"), media),),
            meta=record,
        )

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`total` and the three categories: each the mean of its tasks' accuracies."""
        tables = self.subgroup_tables(judged)
        means = metrics.category_means(tables.get("task", {}), self.categories)
        micro = metrics.mean(entry.value for entry in judged).value
        return {"total": means.pop("total"), **means, "micro": micro}, tables


def _cut(record: Record, chunk: str) -> Record:
    """The record with the name of its ready-made chunk and the time of the query, at which the video ends."""
    return {**record, "chunk": chunk, "realtime": float(record["realtime"])}
