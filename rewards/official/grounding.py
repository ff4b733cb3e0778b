"""Official scorers of Charades-STA (text and JSON answers) and STVG."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rewards.base import Query
from rewards.extract.sections import read_answer
from rewards.extract.structured import as_float, find_structure
from rewards.geometry import box_iou
from rewards.tasks.temporal_grounding import gold_interval

_EXAMPLE = "a specific example is : 20.8 - 30.0 seconds"
_KEYWORDS = ("start", "end", "happen")
# Published with (\d+\.*\d*) on both sides: the same matches, but hours on a response that repeats a digit.
_PAIR = re.compile(r"(?<!\d)(\d+(?:\.+\d*)?)\s*[-\u2013\u2014]\s*(\d+\.*\d*)")
_CLOCK = re.compile(r"\b(?:(\d{1,2}):)?(\d{1,2}):(\d{2}(?:\.\d+)?)\b")


def hull_iou(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Overlap over the hull of both intervals; 0 when the hull is empty."""
    hull = max(a[1], b[1]) - min(a[0], b[0])
    return max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) / hull if hull > 0 else 0.0


def charades_sta(query: Query) -> float:
    """IoU of the interval; for the type "... (JSON)" of the strict JSON answer, malformed input counting 0."""
    gold = gold_interval(query.ground_truth)
    if "json" in query.problem_type.casefold():
        found = _strict_json(query.response)
        return hull_iou(found, gold) if found and found[0] < found[1] else 0.0
    found = _sentence_interval(query.response)
    return hull_iou(found, gold) if found else 0.0


def _sentence_interval(text: str) -> tuple[float, float] | None:
    """First clock pair, else first "a - b" or "a to b", else the first number of each of two lines with a keyword."""
    text = text.lower().replace(_EXAMPLE, "")
    clocks = [int(h or 0) * 3600 + int(m) * 60 + float(s) for h, m, s in _CLOCK.findall(text)]
    if len(clocks) >= 2:
        return _swapped(clocks[0], clocks[1])
    text = text.replace("to", "-")
    pair = _PAIR.search(text)
    if pair:
        try:
            return _swapped(float(pair.group(1)), float(pair.group(2)))
        except ValueError:
            return None
    lines = [line for line in re.split(r"[!?\n]", text) if any(word in line for word in _KEYWORDS)]
    firsts = [re.search(r"\b\d+\.\d+\b|\b\d+\b", line) for line in lines]
    times = [float(match.group(0)) for match in firsts if match]
    return _swapped(times[0], times[1]) if len(times) >= 2 else None


def _swapped(a: float, b: float) -> tuple[float, float]:
    return (a, b) if b > a else (b, a)


def _strict_json(text: str) -> tuple[float, float] | None:
    """`{"time": [a, b]}` as valid JSON, in an answer tag or code fence; numbers may be strings."""
    body = re.sub(r"```(?:json)?", "", read_answer(text).text)
    start, end = body.find("{"), body.rfind("}")
    try:
        value = json.loads(body[start : end + 1]) if start >= 0 else None
        time = value.get("time") if isinstance(value, Mapping) else None
        if not isinstance(time, list) or len(time) != 2:
            return None
        return float(time[0]), float(time[1])
    except (ValueError, TypeError, RecursionError):
        return None


def stvg(query: Query) -> float:
    """vIoU: sum of box IoU over keys of both sides, divided by the size of the union of keys; corners as written."""
    gold = query.ground_truth if isinstance(query.ground_truth, Mapping) else find_structure(str(query.ground_truth))
    boxes, wanted = _raw_boxes(find_structure(read_answer(query.response).text)), _raw_boxes(gold)
    union = boxes.keys() | wanted.keys()
    total = sum(box_iou(boxes[key], wanted[key]) for key in boxes.keys() & wanted.keys())
    return total / len(union) if union else 0.0


def _raw_boxes(value: Any) -> dict[int, tuple[float, float, float, float]]:
    """Boxes by integer second, corners not reordered."""
    entries = value.get("boxes") if isinstance(value, Mapping) else None
    boxes = {}
    for key, box in (entries or {}).items() if isinstance(entries, Mapping) else ():
        second = as_float(key)
        numbers = [as_float(x) for x in box] if isinstance(box, (list, tuple)) else []
        if second is not None and len(numbers) == 4 and None not in numbers:
            x1, y1, x2, y2 = (float(x) for x in numbers if x is not None)
            boxes[int(second)] = (x1, y1, x2, y2)
    return boxes
