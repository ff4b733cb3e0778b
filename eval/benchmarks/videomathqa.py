"""VideoMathQA: 420 five-option questions, and the same questions as sets of binary ones (Rasheed et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.source import lookup


@dataclass(frozen=True, kw_only=True)
class MultiBinary(Benchmark):
    """A question is right only if all its binary pairs are."""

    question_field: str = "question_id"
    """Field that the pairs of one question share; alternatives are separated by "|"."""

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """MBin over the questions, and the plain accuracy over the pairs beside it."""

        def mbin(entries: Sequence[Judged]) -> metrics.Cell:
            pairs = ((str(lookup(entry.item.meta, self.question_field)), entry.value) for entry in entries)
            return metrics.all_correct(pairs)

        tables = {}
        for name, path in self.subgroups.items():
            groups = sorted({str(v) for entry in judged if (v := lookup(entry.item.meta, path)) is not None})
            tables[name] = {g: mbin([e for e in judged if str(lookup(e.item.meta, path)) == g]) for g in groups}
        pairs = metrics.mean(entry.value for entry in judged).value
        return {"mbin": mbin(judged).value, "pair_accuracy": pairs}, tables
