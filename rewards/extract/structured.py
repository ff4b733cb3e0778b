"""JSON-like values in free text: fences, single quotes, trailing commas and integer keys are tolerated."""

from __future__ import annotations

import ast
import json
import re
import warnings
from functools import lru_cache
from typing import Any

from rewards.extract.number import clock_seconds, parse_number

_TRAILING_COMMA = re.compile(r",(\s*[\]}])")
_MARK = re.compile(r"[{}\[\]\"'\\]")
_MAX_DEPTH = 20
_CLOSERS = {"{": "}", "[": "]"}


@lru_cache(maxsize=256)
def find_structure(text: str, kinds: tuple[type, ...] = (dict, list)) -> Any | None:
    """The last outermost `{...}` or `[...]` of `text` that can be read as one of `kinds`, or None.

    The value is shared with later calls on the same text: read it, do not change it.

    Example: "```json\\n{'time': [1, 2],}\\n```" gives {'time': [1, 2]}.
    """
    for start, end in reversed(_outermost(text)):
        value = _load(text[start:end])
        if isinstance(value, kinds):
            return value
    return None


def _outermost(text: str) -> list[tuple[int, int]]:
    """Spans of balanced brackets that lie in no other, in order; one pass, quotes respected inside brackets."""
    spans: list[tuple[int, int]] = []
    stack: list[str] = []
    start, quote, skip = 0, "", -1
    for match in _MARK.finditer(text):
        char, position = match.group(), match.start()
        if position == skip:
            continue
        if quote:
            if char == "\\":
                skip = position + 1
            elif char == quote:
                quote = ""
        elif char in "{[":
            if not stack:
                start = position
            stack.append(_CLOSERS[char])
            if len(stack) > _MAX_DEPTH:
                stack.clear()
        elif stack:
            if char == '"' or (char == "'" and text[position - 1] in "{[,: "):
                quote = char
            elif char == stack[-1]:
                stack.pop()
                if not stack:
                    spans.append((start, position + 1))
            elif char in "}]":
                stack.clear()
    return spans


def _load(source: str) -> Any | None:
    """Parse one bracketed span as JSON, then as JSON without trailing commas, then as a Python literal."""
    for candidate in (source, _TRAILING_COMMA.sub(r"\1", source)):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    try:
        with warnings.catch_warnings():
            # "[2seconds]": what the parser thinks of a response's text is not for the console.
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.literal_eval(source)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def as_float(value: Any) -> float | None:
    """A finite number from a JSON number or numeric string ("10", "10.5s", "00:10"), else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        number = float(value) if abs(value) < 1e300 else float("inf")
    elif isinstance(value, str):
        seconds = float(value) if value.isdecimal() and len(value) < 16 else clock_seconds(value)
        if seconds is None:
            parsed = parse_number(value)
            if parsed is None:
                return None
            seconds = parsed.value
        number = seconds
    else:
        return None
    return number if abs(number) < float("inf") else None
