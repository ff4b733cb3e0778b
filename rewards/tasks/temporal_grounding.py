"""Temporal grounding: IoU of the answered and the gold interval."""

from __future__ import annotations

from collections.abc import Sequence
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
    """1-D IoU of seconds; a reversed interval is read in order, an empty one scores 0.

    Args:
        reward_threshold: None = training maximises the tIoU; a number = it gets 1 where the tIoU reaches it, else 0
            (R1@threshold). A constant interval in the middle overlaps with most gold intervals, so the dense reward
            draws a policy that has not learnt to look yet to that answer; a high threshold leaves it nothing. The
            accuracy stays the tIoU.
        aliases: further names of the type.
    """

    def __init__(self, reward_threshold: float | None = None, aliases: Sequence[str] = ()) -> None:
        super().__init__(aliases)
        if reward_threshold is not None and not 0 < reward_threshold <= 1:
            raise ValueError(f"reward_threshold={reward_threshold} must lie in (0, 1]")
        self.reward_threshold = reward_threshold

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy = tIoU in [0, 1]."""
        gold = gold_interval(query.ground_truth)
        interval, reason = find_interval(answer)
        if interval is None:
            return unparsable(reason)
        tiou = interval_iou(interval, gold)
        reward = None if self.reward_threshold is None else float(tiou >= self.reward_threshold)
        return Verdict(tiou, parts={"tiou": tiou}, reward=reward)

    def well_formed(self, query: Query, answer: str) -> bool:
        """An interval with a start at or after 0 and before its end, in at most 200 characters."""
        interval, _ = find_interval(answer)
        return interval is not None and len(answer) <= 200 and 0 <= interval[0] < interval[1]
