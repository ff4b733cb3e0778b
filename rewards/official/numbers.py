"""Official scorers of Video-MMMU (MMMU parsers) and VSI-Bench."""

from __future__ import annotations

import math
import re

from rewards.base import Query
from rewards.official.letters import gold

_TRIVIAL = {":", ",", ".", "!", "?", ";", "'"}
_INDICATORS = (
    *("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ", "are ", "in total ", "total "),
    *("identify ", "recognize ", "calculated as ", "counted as ", "measured as ", "observed as ", "concluded as "),
    *("found to be ", "equals ", "determined to be ", "number of ", "value is ", "adds up to ", "have ", "has "),
)


def video_mmmu(query: Query) -> float:
    """Text behind the last "Answer:", then MMMU's parsers; an empty answer is wrong."""
    text = query.response.rpartition("Answer:")[-1].strip()
    if not text or text == "API Error":
        return 0.0
    if query.options:
        return float(_choice(text, query.options) == gold(query))
    wanted, values = _normal(str(query.ground_truth)), _open_values(text)
    texts = [value for value in wanted if isinstance(value, str)]
    # A text that contains the answer, or a number that equals it.
    return float(any(any(t in v for t in texts) if isinstance(v, str) else v in wanted for v in values))


def _choice(text: str, options: tuple[str, ...]) -> str:
    """ "A." or "A:" anywhere, else "(A)", else "A ", else option text in answers of six words and more; last wins."""
    letters = [chr(ord("A") + i) for i in range(len(options))]
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    dotted = [x for x in letters if f"{x}." in text]
    candidates = dotted + [x for x in letters if f"{x}:" in text]
    form = "{}." if dotted else "{}:"
    if not candidates:
        candidates, form = [x for x in letters if f"({x})" in text], "({})"
    if not candidates:
        candidates, form = [x for x in letters if f"{x} " in text], " {} "
    if candidates:
        return max(candidates, key=lambda x: (text.rfind(form.format(x)), -candidates.index(x)))
    if len(text.split()) > 5:
        known = {x: option.lower() for x, option in zip(letters, options, strict=True)}
        hits = [x for x in letters if known[x] in text.lower()]
        if hits:
            return max(hits, key=lambda x: (text.lower().rfind(known[x]), -hits.index(x)))
    return ""


def _normal(text: str) -> list[float | str]:
    """A number rounded to two decimals, else lower-cased text; a single character must touch a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _numbers(text: str) -> list[str]:
    grouped = re.findall(r"-?\b\d{1,3}(?:,\d{3})+\b", text)
    # Beginning at the first digit only changes no match, and spares long runs of digits quadratic time.
    scientific = re.findall(r"(?:-|(?<!\d))\d+(?:\.\d+)?[eE][+-]?\d+", text)
    simple = re.findall(r"(?:-|(?<!\d)|(?=\.))(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])", text)
    return [*grouped, *scientific, *simple]


def _open_values(text: str) -> list[float | str]:
    """Shortest tails behind the indicator words of every sentence, and every number in them."""
    text = text.strip().strip(".").lower()
    parts = re.split(r"\.\s(?=[A-Z])|\n", text)
    tails = []
    for index, part in enumerate(parts):
        marks = (*_INDICATORS, "=") if index == len(parts) - 1 else _INDICATORS
        found = [part.split(mark)[-1].strip() for mark in marks if mark in part]
        shortest = ""
        for tail in found:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in _TRIVIAL:
            tails.append(shortest)
    tails = tails or [text]
    values = [*tails, *(number for tail in tails for number in _numbers(tail))]
    return [value for entry in values for value in _normal(entry)]


def vsi_bench(query: Query) -> float:
    """First token only; letters compared in any case, numbers by mean relative accuracy in floating point."""
    token = query.response.split(" ")[0].rstrip(".").strip()
    try:
        target = None if query.options else float(str(query.ground_truth))
    except ValueError:
        target = None
    if target is None:
        return float(token.lower() == str(query.ground_truth).strip().lower())
    try:
        return mean_relative_accuracy(float(token), target)
    except ValueError:
        return 0.0


def mean_relative_accuracy(predicted: float, target: float) -> float:
    """The original's arithmetic: ten float64 points from 0.5 to 0.95, `<=`. An error of exactly 0.2 misses 0.8.

    As in numpy, a gold of 0 divides to infinity or to NaN and passes no point.
    """
    error = abs(predicted - target) / target if target else math.inf
    points = [*(0.5 + i * ((0.95 - 0.5) / 9) for i in range(9)), 0.95]
    return sum(error <= 1 - point for point in points) / 10
