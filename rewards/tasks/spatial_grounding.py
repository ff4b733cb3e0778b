"""Spatial grounding: IoU of the answered and the gold box."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.span import box_of, find_box
from rewards.geometry import CoordinateSystem, aligned, box_iou


class SpatialGrounding(TaskReward):
    """Box IoU; corners are read in order, a box outside the frame keeps its raw extent.

    Args:
        aliases: further names of the problem type.
        coordinates: system of gold and answer unless the record says otherwise.
    """

    def __init__(self, aliases: Sequence[str] = (), coordinates: CoordinateSystem = "pixel") -> None:
        super().__init__(aliases)
        self.coordinates: CoordinateSystem = coordinates

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy = IoU in [0, 1]. Raises ValueError for a gold without a box."""
        gold = query.ground_truth
        gold_box = find_box(gold)[0] if isinstance(gold, str) else box_of(gold)
        if gold_box is None:
            raise ValueError(f"the gold answer {gold!r} holds no box [x1, y1, x2, y2]")
        box, reason = find_box(answer)
        if box is None:
            return unparsable(reason)
        iou = box_iou(*aligned(box, gold_box, query.fields, self.coordinates))
        return Verdict(iou, parts={"iou": iou})

    def well_formed(self, query: Query, answer: str) -> bool:
        """One box of four numbers in at most 200 characters."""
        return len(answer) <= 200 and find_box(answer)[0] is not None
