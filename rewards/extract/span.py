"""Time intervals and boxes in free text and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.extract.number import clock_seconds, normalise
from rewards.extract.structured import as_float, find_structure

Interval = tuple[float, float]
Box = tuple[float, float, float, float]

_TIME = r"(?:\d{1,2}:)?\d{1,3}:\d{2}(?:\.\d+)?|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_UNIT = r"(?:\s*(?:seconds?|secs?|s|秒)(?![a-z]))?"
_PAIR = re.compile(
    rf"(?<![A-Za-z0-9_.:])(?P<a>{_TIME}){_UNIT}"
    rf"\s*(?:-|to|until|till|and|through|~|→|[-=]>|\.\.+|,|;|至|到|and\s+(?:ends?\s+at|(?:lasts|continues|runs|goes\s+on)\s+(?:until|till|to)))\s*"
    rf"(?:(?:the\s+)?end(?:s|ing)?(?:\s+time)?\s*(?:is|at|:|=)?\s*|(?:second|sec|time)\s+)?"
    rf"(?P<b>{_TIME}){_UNIT}(?![A-Za-z0-9_:]|\.\d)",
    re.IGNORECASE,
)
# "1 minute 10 seconds", "1h2m3s", "2 min": hours or minutes must be there.
_SPELLED = re.compile(
    r"(?<![\w.:])(?=\d+(?:\.\d+)?\s?(?:h|m|分))(?:(?P<h>\d+)\s?(?:hours?|hrs?|h)(?:\s?,?\s?(?:and\s)?(?=\d)|(?![a-z])))?"
    r"(?:(?P<m>\d+(?:\.\d+)?)\s?(?:minutes?|mins?|m|分钟?)(?:\s?,?\s?(?:and\s)?(?=\d+(?:\.\d+)?\s?(?:s|秒))|(?![a-z])))?"
    r"(?:(?P<s>\d+(?:\.\d+)?)\s?(?:seconds?|secs?|s|秒)(?![a-z]))?",
    re.IGNORECASE,
)
_START = re.compile(
    rf"(?:\b(?:start|begin|began)(?:s|ed|ning|ing)?\b|开始|起始)[^\d\n-]{{0,30}}(?P<t>{_TIME})", re.IGNORECASE
)
_END = re.compile(
    rf"(?:\b(?:end|finish|stop)(?:es|s|ed|ped|ing|ping)?\b|结束|终止)[^\d\n-]{{0,30}}(?P<t>{_TIME})", re.IGNORECASE
)
_NAMES = ("time", "times", "interval", "timestamp", "timestamps", "time_range", "segment", "span", "answer")
_HEDGE = re.compile(r"\b(?:about|around|approximately|roughly)\s+(?=\d)", re.IGNORECASE)
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|第\s*(?=\d)", re.IGNORECASE)
_KEYS = (("start", "end"), ("start_time", "end_time"), ("begin", "end"), ("from", "to"), ("t_start", "t_end"))


def find_interval(text: str) -> tuple[Interval | None, str]:
    """The interval in seconds that `text` states, start before end, and why there is none.

    JSON first (`{"time": [a, b]}`, `[a, b]`, `{"start": a, "end": b}`), then "a to b" in numbers or mm:ss. A reversed
    interval is swapped. Several different intervals in one sentence are a hedge and no answer; over several
    sentences the last one counts.
    """
    value = find_structure(text)
    if value is not None:
        interval = interval_of(value)
        if interval is not None:
            return interval, ""
        if isinstance(value, Mapping):
            return None, "the JSON holds no interval of two numbers"
    clean = _SPELLED.sub(
        lambda m: f"{float(m['h'] or 0) * 3600 + float(m['m'] or 0) * 60 + float(m['s'] or 0):g}s",
        _ORDINAL.sub("", _HEDGE.sub("", normalise(text))),
    )
    starts, ends = _START.findall(clean), _END.findall(clean)
    if starts and ends:
        return _ordered(_seconds(starts[-1]), _seconds(ends[-1])), ""
    for sentence in reversed(re.split(r"(?<=[^.][.!?。])\s+|\n+", clean)):
        matches = list(_PAIR.finditer(sentence))
        # A comma joins two times only where nothing more explicit does.
        explicit = [m for m in matches if "," not in m.group(0) and ";" not in m.group(0)]
        pairs = [_ordered(_seconds(m["a"]), _seconds(m["b"])) for m in explicit or matches]
        if len(set(pairs)) > 1:
            return None, f"{len(set(pairs))} different intervals in one sentence"
        if pairs:
            return pairs[0], ""
    return None, "no interval in the answer"


def _seconds(text: str) -> float:
    clock = clock_seconds(text)
    return float(text) if clock is None else clock


def _ordered(a: float, b: float) -> Interval:
    return (a, b) if a <= b else (b, a)


def interval_of(value: Any) -> Interval | None:
    """Interval from a parsed value: [a, b], [[a, b]], {"time": ...} or {"start": a, "end": b}."""
    if isinstance(value, Mapping):
        keys = {str(key).strip().lower(): item for key, item in value.items()}
        for name in _NAMES:
            if name in keys:
                return interval_of(keys[name])
        for first, second in _KEYS:
            if first in keys and second in keys:
                return interval_of([keys[first], keys[second]])
        return None
    if isinstance(value, str):
        return find_interval(value)[0] if len(value) < 200 and not value.lstrip().startswith(("[", "{")) else None
    if not isinstance(value, Sequence):
        return None
    if len(value) == 1 and isinstance(value[0], Sequence) and not isinstance(value[0], str):
        return interval_of(value[0])
    if len(value) != 2:
        return None
    start, end = as_float(value[0]), as_float(value[1])
    return None if start is None or end is None else _ordered(start, end)


_BOX_TEXT = re.compile(r"(?<![A-Za-z_])-?(?<![A-Za-z_\d.])\d+(?:\.\d+)?")
_BOX_KEYS = ("bbox_2d", "bbox", "box", "boxes", "bounding_box", "coordinates", "answer")


def find_box(text: str) -> tuple[Box | None, str]:
    """The box x1, y1, x2, y2 that `text` states, corners ordered, and why there is none."""
    value = find_structure(text)
    if value is not None:
        found = box_of(value)
        return (found, "") if found else (None, "the brackets hold no box of four numbers")
    numbers = _BOX_TEXT.findall(normalise(text))
    if len(numbers) != 4:
        return None, f"a box needs four numbers, found {len(numbers)}"
    return box_of([float(number) for number in numbers]), ""


def box_of(value: Any) -> Box | None:
    """Box from a parsed value: four numbers, two corner pairs, one box in a list, or a mapping that names it."""
    if isinstance(value, Mapping):
        keys = {str(key).strip().lower(): item for key, item in value.items()}
        for name in _BOX_KEYS:
            if name in keys:
                return box_of(keys[name])
        if {"x1", "y1", "x2", "y2"} <= set(keys):
            return box_of([keys[name] for name in ("x1", "y1", "x2", "y2")])
        return None
    if isinstance(value, str):
        return find_box(value)[0] if len(value) < 200 and not value.lstrip().startswith("{") else None
    if not isinstance(value, Sequence):
        return None
    if len(value) == 1 and not isinstance(value[0], (int, float, str)):
        return box_of(value[0])
    if len(value) == 2 and all(isinstance(v, Sequence) and not isinstance(v, str) and len(v) == 2 for v in value):
        return box_of([*value[0], *value[1]])
    if len(value) != 4:
        return None
    numbers = [as_float(item) for item in value]
    if any(number is None for number in numbers):
        return None
    x1, y1, x2, y2 = (float(number) for number in numbers if number is not None)
    return (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
