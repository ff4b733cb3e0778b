"""Overlap of intervals and boxes, and the explicit conversion of box coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rewards.extract.span import Box, Interval

CoordinateSystem = Literal["pixel", "relative1000", "unit"]


def interval_iou(a: Interval, b: Interval) -> float:
    """Intersection over union of two intervals (start, end) in seconds; 0 when either is empty or reversed."""
    if a[1] <= a[0] or b[1] <= b[0]:
        return 0.0
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes (x1, y1, x2, y2); 0 when either is empty or has reversed corners."""
    area_a, area_b = _area(a), _area(b)
    if area_a <= 0 or area_b <= 0:
        return 0.0
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    overlap = width * height
    return min(1.0, overlap / (area_a + area_b - overlap))


def _area(box: Box) -> float:
    width, height = box[2] - box[0], box[3] - box[1]
    return width * height if width > 0 and height > 0 else 0.0


def frame_size(fields: Mapping[str, Any]) -> tuple[float, float] | None:
    """(width, height) in pixels from the record (`width`/`height`, `frame_size`, `image_size`), or None."""
    nested = fields.get("meta")
    for source in (fields, nested if isinstance(nested, Mapping) else {}):
        width, height = source.get("width"), source.get("height")
        if width and height:
            return float(width), float(height)
        for name in ("frame_size", "image_size"):
            size = source.get(name)
            if size is not None:
                return float(size[0]), float(size[1])
    return None


def to_pixels(box: Box, system: CoordinateSystem, size: tuple[float, float] | None) -> Box:
    """`box` in pixels. Raises ValueError when a relative system comes without the frame's size."""
    if system == "pixel":
        return box
    if system not in ("relative1000", "unit"):
        raise ValueError(f"coordinate system {system!r}: use pixel, relative1000 or unit")
    if size is None:
        raise ValueError(f"{system} coordinates need the frame size: add `width` and `height` to the record")
    scale = 1000.0 if system == "relative1000" else 1.0
    width, height = size
    return (box[0] / scale * width, box[1] / scale * height, box[2] / scale * width, box[3] / scale * height)


def aligned(predicted: Box, gold: Box, fields: Mapping[str, Any], default: CoordinateSystem) -> tuple[Box, Box]:
    """Both boxes in one system.

    The record may say `answer_coordinates` (what the prompt asked for) and `gold_coordinates`; either defaults to
    `default`. Equal systems are compared as they are, different ones are converted to pixels.
    """
    if not fields:
        return predicted, gold
    ours = fields.get("answer_coordinates") or default
    theirs = fields.get("gold_coordinates") or default
    if ours == theirs:
        return predicted, gold
    size = frame_size(fields)
    return to_pixels(predicted, ours, size), to_pixels(gold, theirs, size)
