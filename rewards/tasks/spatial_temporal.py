"""Spatio-temporal grounding and tracking: when something is visible and where, one box per second or frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.span import Box, Interval, box_of, interval_of
from rewards.extract.structured import as_float, find_structure
from rewards.geometry import CoordinateSystem, aligned, box_iou, interval_iou

_MAX_BOXES = 10_000
_KEYS = ("time", "frame", "second", "t", "frame_index", "timestamp")


def read_boxes(value: Any) -> dict[int, Box]:
    """Boxes by integer key from {"2": box}, {2.0: box}, [{"time": 2, "bbox": box}] or a plain list (keys 0, 1, ...).

    Keys are normalised to integers, so "2", 2 and "2.0" are one key; unreadable entries are left out.
    """
    items: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = []
        for index, item in enumerate(value):
            named = [item[key] for key in _KEYS if key in item] if isinstance(item, Mapping) else []
            items.append((named[0] if named else index, item))
    else:
        return {}
    boxes: dict[int, Box] = {}
    for key, item in items[:_MAX_BOXES]:
        number, box = as_float(key), box_of(item)
        if number is not None and box is not None and abs(number) < 1e9:
            boxes.setdefault(round(number), box)
    return boxes


def read_tube(value: Any) -> tuple[Interval | None, dict[int, Box]]:
    """Interval and boxes from {"time": [a, b], "boxes": {...}} or from boxes alone."""
    if isinstance(value, Mapping):
        keys = {str(key).strip().lower(): item for key, item in value.items()}
        for name in ("boxes", "bboxes", "tracks", "trajectory"):
            if name in keys:
                return interval_of(keys), read_boxes(keys[name])
        return interval_of(keys) if not all(as_float(k) is not None for k in keys) else None, read_boxes(value)
    return None, read_boxes(value)


def _parsed(value: Any) -> Any:
    return find_structure(value) if isinstance(value, str) else value


class SpatialTemporalGrounding(TaskReward):
    """`time_weight` tIoU + (1 - `time_weight`) mean box IoU over the *union* of gold and answered keys.

    A key that only one side has counts 0: one perfect box of four is a quarter, and boxes outside the gold interval
    cost. Where the gold has no boxes, tIoU alone counts.

    Args:
        aliases: further names of the problem type.
        time_weight: weight of the temporal part, in [0, 1].
        coordinates: system of gold and answer unless the record says otherwise.
    """

    def __init__(
        self, aliases: Sequence[str] = (), time_weight: float = 0.5, coordinates: CoordinateSystem = "pixel"
    ) -> None:
        super().__init__(aliases)
        if not 0 <= time_weight <= 1:
            raise ValueError(f"time_weight={time_weight} lies outside [0, 1]")
        self.time_weight = time_weight
        self.coordinates: CoordinateSystem = coordinates

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1] with parts tiou, miou and num_boxes. Raises ValueError for a gold without content."""
        gold_time, gold_boxes = read_tube(_parsed(query.ground_truth))
        if gold_time is None and not gold_boxes:
            raise ValueError(f"the gold answer {str(query.ground_truth)[:80]!r} holds neither `time` nor `boxes`")
        time, boxes = read_tube(find_structure(answer))
        if time is None and not boxes:
            return unparsable("no JSON with `time` or `boxes`")
        tiou = interval_iou(time, gold_time) if time and gold_time else 0.0
        miou = self.mean_iou(boxes, gold_boxes, query.fields)
        weight = 1.0 if not gold_boxes else 0.0 if gold_time is None else self.time_weight
        accuracy = weight * tiou + (1 - weight) * miou
        return Verdict(accuracy, parts={"tiou": tiou, "miou": miou, "num_boxes": float(len(boxes))})

    def mean_iou(self, boxes: Mapping[int, Box], gold: Mapping[int, Box], fields: Mapping[str, Any]) -> float:
        """Mean IoU over the union of keys; 0 when both are empty."""
        union = boxes.keys() | gold.keys()
        common = boxes.keys() & gold.keys()
        total = sum(box_iou(*aligned(boxes[key], gold[key], fields, self.coordinates)) for key in common)
        return total / len(union) if union else 0.0

    def well_formed(self, query: Query, answer: str) -> bool:
        """JSON with an interval in order and, where the gold has boxes, at least one box."""
        time, boxes = read_tube(find_structure(answer))
        needs_boxes = bool(read_tube(_parsed(query.ground_truth))[1])
        return time is not None and 0 <= time[0] < time[1] and (bool(boxes) or not needs_boxes)


class Tracking(SpatialTemporalGrounding):
    """Boxes by frame or second: mean IoU over the union of keys; an interval, when given, adds nothing."""

    def __init__(self, aliases: Sequence[str] = (), coordinates: CoordinateSystem = "pixel") -> None:
        super().__init__(aliases, time_weight=0.0, coordinates=coordinates)

    def well_formed(self, query: Query, answer: str) -> bool:
        """JSON with at least one box."""
        return bool(read_tube(find_structure(answer))[1])
