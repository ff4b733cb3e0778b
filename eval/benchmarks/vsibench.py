"""VSI-Bench: eight spatial tasks, multiple choice and numbers (Yang et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from datamodules.records import Record
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.drafts import Draft
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source


@dataclass(frozen=True, kw_only=True)
class VSIBench(Benchmark):
    """Unweighted mean of eight tasks; questions without options are numbers, scored by mean relative accuracy."""

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """Questions without options ask for a number."""
        for record in records:
            draft = self.draft(record, source, media)
            yield draft if draft.texts else replace(draft, problem_type="regression")

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`overall` = mean of the eight tasks, of which one has three levels; absent tasks make it partial."""
        tables = self.subgroup_tables(judged)
        types = tables.get("question_type", {})
        tasks = metrics.vsi_tasks({name: cell.value for name, cell in types.items()})
        choice = metrics.mean(entry.value for entry in judged if entry.item.sample.options).value
        number = metrics.mean(entry.value for entry in judged if not entry.item.sample.options).value
        overall = metrics.mean_of(tasks[name] for name in self.macro_groups if name in tasks)
        return {"overall": overall, "accuracy_choice": choice, "mra_numbers": number}, tables
