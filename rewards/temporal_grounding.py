"""Temporal grounding: IoU of the answered and the gold interval."""

from __future__ import annotations

from typing import Any

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.span import Interval, find_interval, interval_of
from rewards.geometry import interval_iou


def gold_interval(gold: Any) -> Interval:
    """The gold interval. Raises ValueError when there is none."""
    found = find_interval(gold)[0] if isinstance(gold, str) else interval_of(gold)
    if found is None:
        raise ValueError(f"the gold answer {gold!r} holds no interval [start, end]")
    return found


class TemporalGrounding(TaskReward):
    """1-D IoU of seconds; a reversed interval is read in order, an empty one scores 0."""

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy = tIoU in [0, 1]."""
        gold = gold_interval(query.ground_truth)
        interval, reason = find_interval(answer)
        if interval is None:
            return unparsable(reason)
        tiou = interval_iou(interval, gold)
        return Verdict(tiou, parts={"tiou": tiou})

    def well_formed(self, query: Query, answer: str) -> bool:
        """An interval with a start at or after 0 and before its end, in at most 200 characters."""
        interval, _ = find_interval(answer)
        return interval is not None and len(answer) <= 200 and 0 <= interval[0] < interval[1]
