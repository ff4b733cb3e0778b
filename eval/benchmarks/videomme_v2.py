"""Video-MME-v2: four questions per group, scored together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged


@dataclass(frozen=True, kw_only=True)
class VideoMMEv2(Benchmark):
    """Group non-linear score (headline) and plain accuracy.

    Questions of one `video_id` form a group: relevance groups grow faster than the number of right answers, logic
    groups count how far the chain is right from its first question on. Subgroup fields stand on any question of a
    group.
    """

    group_field: str = "video_id"

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """Mean over the groups. A group with a question that was not judged is left out."""
        groups: dict[str, list[Judged]] = defaultdict(list)
        for entry in judged:
            groups[str(entry.item.meta.get(self.group_field))].append(entry)
        scored = [(entries, _group_value(entries)) for entries in groups.values()]

        def first(entries: Sequence[Judged], path: str) -> Any:
            return next((v for entry in entries if (v := entry.item.meta.get(path)) not in (None, "")), None)

        tables = {
            name: metrics.table((first(entries, path), value) for entries, value in scored)
            for name, path in self.subgroups.items()
        }
        headline = {
            "group_score": metrics.mean(value for _, value in scored).value,
            "accuracy": metrics.mean(entry.value for entry in judged).value,
        }
        return headline, tables


def _group_value(entries: Sequence[Judged]) -> float | None:
    """Score of a group in [0, 1]; missing questions count as wrong."""
    if any(entry.value is None for entry in entries):
        return None
    scores = [0.0] * 4
    for entry in entries:
        place = str(entry.item.meta.get("question_id", "")).rpartition("-")[2]
        if place.isdigit() and 1 <= int(place) <= 4:
            scores[int(place) - 1] = entry.value or 0.0
    meta = entries[0].item.meta
    if str(meta.get("group_type")).lower() == "logic":
        return metrics.group_logic(scores, meta.get("group_structure")) / 100
    return metrics.group_relevance(scores) / 100
