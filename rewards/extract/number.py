"""Numbers in free text: signs, thousands commas, fractions, LaTeX, percent, units, words, CJK numerals, clock times."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rewards.extract.sections import boxed, plain

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_TENS = {
    word: 10 * (i + 2)
    for i, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])
}
_SHORT_SCALES = {
    "k": 1e3,
    "dozen": 12,
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "千": 1e3,
    "万": 1e4,
    "亿": 1e8,
}
_LONE = {"half": 0.5, "quarter": 0.25, "once": 1.0, "twice": 2.0, "thrice": 3.0}
_LONE_WORD = re.compile(r"\b(?:half|quarter|twice|thrice|once(?=\W*$|\s*[.,;!\n]))\b", re.IGNORECASE)
_SCALES = {"hundred": 100, "dozen": 12, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_CJK = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_DIGIT_WORD = "|".join(_SMALL[:10])
_WORD = "|".join(sorted([*_UNITS, *_TENS, *_SCALES], key=len, reverse=True))

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[\u00a0\u202f ]\d{3})+(?![\d.,]?\d)|\d+)(?:\.\d+)?|\.\d+"
_TOKEN = re.compile(
    rf"""
    (?P<frac>(?P<fs>-\s?)?\\[dt]?frac\s*\{{\s*(?P<fn>-?[\d.,]+)\s*\}}\s*\{{\s*(?P<fd>-?[\d.,]+)\s*\}})
  | (?P<sci>(?<![A-Za-z0-9_.])[-+]?(?:{_DIGITS})\s*(?:\\times|×|x|\*)\s*10\s*\^?\s*\{{?\s*(?P<se>[-+]?\d+)\}}?)
  | (?P<pow>(?<![A-Za-z0-9_.])10\s?\^\s?\{{?(?P<pe>[-+]?\d+)\}}?)
  | (?P<ratio>(?<![A-Za-z0-9_./])[-+]?(?:(?P<whole>\d+)\s+)?\d+\s*/\s*\d+(?![A-Za-z0-9_/.]))
  | (?P<num>(?<![A-Za-z0-9_.,])[-+]?(?:{_DIGITS})
      (?:e[-+]?\d+(?![\w])|\s?(?P<scale>k|dozen|thousand|million|billion|万|亿|千)(?![A-Za-z]))?
      (?P<pct>\s?(?:%|\\%|percent\b|per\scent\b))?)
  | (?P<word>(?<![\w-])(?<!\bno\s)(?:(?:minus|negative)\s+)?(?:{_WORD})(?:(?:\s+and\s+|[\s-]+)(?:{_WORD}))*
      (?:\s+and\s+a\s+half|\s+point(?:\s+(?:{_DIGIT_WORD}))+)?(?![\w-]))
  | (?P<cjk>[零一二三四五六七八九十百千万两兩〇]+)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_MINUS = re.compile(r"(?<!\d )\b(?:minus|negative)\s+(?=\d)", re.IGNORECASE)
_HALF_DOZEN = re.compile(r"\bhalf\s+(?:a\s+)?dozen\b", re.IGNORECASE)
_SIGN = re.compile(r"[\u2212\u2013\u2014\uff0d](?=\s?[\d.])")


@dataclass(frozen=True)
class Number:
    """One number of a text."""

    value: float
    text: str
    start: int
    end: int
    percent: bool = False


def find_numbers(text: str) -> list[Number]:
    """Every number of `text` (already `plain`) from left to right; one that overflows a float is infinite."""
    found = []
    for match in _TOKEN.finditer(text):
        value = _value(match)
        if value is not None:
            percent = bool(match.group("pct"))
            found.append(Number(value, match.group(0), match.start(), match.end(), percent))
    return found


def _to_float(text: str) -> float:
    return float(text.replace(",", "").replace(" ", ""))


def _value(match: re.Match[str]) -> float | None:
    kind = next(k for k in ("frac", "sci", "pow", "ratio", "num", "word", "cjk") if match.group(k))
    text = match.group(kind)
    try:
        if kind == "frac":
            value = _to_float(match.group("fn")) / _to_float(match.group("fd"))
            return -value if match.group("fs") else value
        if kind == "sci":
            mantissa = re.match(rf"[-+]?(?:{_DIGITS})", text)
            return _to_float(mantissa.group(0)) * 10.0 ** int(match.group("se")) if mantissa else None
        if kind == "pow":
            return 10.0 ** int(match.group("pe"))
        if kind == "ratio":
            return _ratio(text, match.group("whole"))
        if kind == "num":
            bare = re.sub(r"\s?(?:\\?%|per ?cent)$", "", text, flags=re.IGNORECASE)
            scale = (match.group("scale") or "").lower()
            return _to_float(bare[: len(bare) - len(scale)]) * _SHORT_SCALES.get(scale, 1.0)
        if kind == "word":
            return _words(text)
        return _cjk(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _ratio(text: str, whole: str | None) -> float:
    sign = -1.0 if text.startswith("-") else 1.0
    body = text.lstrip("+-").strip()
    if whole:
        body = body[len(whole) :]
    top, bottom = body.split("/")
    return sign * (float(whole or 0) + float(top) / float(bottom))


def _words(text: str) -> float:
    sign, total, current = 1.0, 0, 0
    whole, _, decimals = text.lower().partition(" point ")
    if decimals:
        tail = float("0." + "".join(str(_UNITS[word]) for word in decimals.split()))
        value = _words(whole)
        return value - tail if whole.startswith(("minus", "negative")) else value + tail
    for word in re.split(r"[\s-]+", whole):
        if word in ("minus", "negative"):
            sign = -1.0
        elif word in _UNITS:
            current += _UNITS[word]
        elif word in _TENS:
            current += _TENS[word]
        elif word in ("hundred", "dozen"):
            current = max(current, 1) * _SCALES[word]
        elif word == "half":
            return sign * (total + current + 0.5)
        elif word in _SCALES:
            total += max(current, 1) * _SCALES[word]
            current = 0
    return sign * (total + current)


def _cjk(text: str) -> float | None:
    if all(char in _CJK for char in text):
        return float("".join(str(_CJK[char]) for char in text))
    total, section, digit = 0, 0, 0
    for char in text:
        if char in _CJK:
            digit = _CJK[char]
        elif char == "万":
            total, section, digit = (total + section + digit) * 10_000, 0, 0
        else:
            section += max(digit, 1) * {"十": 10, "百": 100, "千": 1000}[char]
            digit = 0
    return float(total + section + digit)


_CLOCK = re.compile(r"\s*(?:(\d{1,2}):)?(\d{1,3}):(\d{2}(?:\.\d+)?)\s*")


def clock_seconds(text: str) -> float | None:
    """Seconds of "mm:ss" or "h:mm:ss", or None."""
    match = _CLOCK.fullmatch(text)
    if not match:
        return None
    hours, minutes, seconds = match.groups()
    return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)


def normalise(text: str) -> str:
    """`plain` text with one kind of minus sign; what `find_numbers` expects."""
    return _MINUS.sub("-", _SIGN.sub("-", _HALF_DOZEN.sub("6", plain(text))))


def parse_number(text: str) -> Number | None:
    """The one number of a short text ("about 3.5 m", "$1,200", "1/2"), or None when there is none or several."""
    numbers = find_numbers(normalise(text))
    return numbers[0] if len(numbers) == 1 else None


_CUE = re.compile(
    r"(?:\b(?:final|answer|result|total|sum|value|count|estimate|number)\b[^.\n\d]{0,40}?"
    r"(?:\bis\b|\bare\b|\bequals?\b|:|=|\bof\b)|\bequals?\b|\bmakes?\b|=|\\approx|≈|\btherefore\b|\bthus\b|答案[是为為]?:?|\b(?:wait|actually|correction)\b[,:]?)"
    r"\s*(?:(?:about|approximately|around|roughly|nearly|a total of|exactly|~|only)\s*)*[\[({$£€¥]*\s*",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(r"\s*(?:or|/|and/or|to|-|~|through|或|至|到)\s*-?$", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|isn't|rather than|instead of)\s+(?:(?:about|exactly|just)\s+)?[\"'(\[]?$", re.IGNORECASE
)
_BECAUSE = re.compile(r"\b(?:since|because|given\s+that)\b", re.IGNORECASE)
_NONE = re.compile(r"\W*none\W*", re.IGNORECASE)
_NOT_LISTING = re.compile(r"[\s,;&.()\[\]]+|\b(?:and|both)\b", re.IGNORECASE)
_TURN = re.compile(r"\b(?:then|finally|but|later|so|thus|hence|therefore)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?。])\s+|\n+")
_LEAD = re.compile(
    r"\W*(?:(?:it(?:'s| is)|there (?:are|is)|about|approximately|around|roughly|nearly|exactly|only|~|≈)\s*)*\W*$",
    re.IGNORECASE,
)


def find_number(text: str, *, allow_range: bool = False) -> tuple[Number | None, str]:
    """The number that `text` gives as its answer, and why there is none.

    A boxed number wins, then the last one after a cue ("the answer is"), then a leading one, then the last one.
    Alternatives ("12 or 13", "5 to 6") are no answer unless `allow_range`, which takes the first.
    """
    clean = normalise(text)
    boxes = boxed(clean)
    if boxes:
        clean = normalise(boxes[-1][1])
    numbers = find_numbers(clean)
    numbers = [number for number in numbers if not _DENIED.search(clean[max(0, number.start - 24) : number.start])]
    if not numbers and _NONE.fullmatch(clean):
        return Number(0.0, "none", 0, 0), ""
    if not numbers:
        lone = {match.group().lower() for match in _LONE_WORD.finditer(clean)}
        if len(lone) == 1:
            word = lone.pop()
            return Number(_LONE[word], word, 0, 0), ""
        return None, "no number in the answer"
    listed = _NOT_LISTING.sub("", _TOKEN.sub("", clean)) == "" and len({number.value for number in numbers}) > 1
    if listed and not allow_range and len(_TOKEN.findall(clean)) > 1 and "-" not in clean:
        return None, f"several numbers: {', '.join(number.text.strip() for number in numbers[:5])}"
    index = _pick(clean, numbers)
    while index and _alternatives(clean, numbers[index - 1], numbers[index]):
        index -= 1  # "5 to 6" is one statement, whichever end was picked
    rest = numbers[index + 1 :]
    differs = bool(rest) and rest[0].value != numbers[index].value
    if not allow_range and differs and _alternatives(clean, numbers[index], rest[0]):
        return None, f"alternatives instead of one number: {clean[numbers[index].start : rest[0].end]!r}"
    return numbers[index], ""


def _alternatives(clean: str, first: Number, second: Number) -> bool:
    """Whether two neighbouring numbers are joined to a range or a choice: "12 or 13", "5-6", "between 5 and 6"."""
    between = clean[first.end : second.start]
    if " and" in between and re.search(r"\bbetween\s*$", clean[max(0, first.start - 20) : first.start], re.IGNORECASE):
        return True
    has_unit = re.match(r"\s?[A-Za-z%°²]+\s+\S", between)
    short = re.sub(r"^\s?[A-Za-z%°²]+\s", " ", between) if has_unit else between
    return len(between) < 24 and _ALTERNATIVE.search(short) is not None


def _pick(clean: str, numbers: list[Number]) -> int:
    """Index of the number that is the answer."""
    starts = {number.start: i for i, number in enumerate(numbers)}
    cued = [starts[match.end()] for match in _CUE.finditer(clean) if match.end() in starts]
    if cued:
        return cued[-1]
    first_line, _, rest = clean.strip().partition("\n")
    reason = _BECAUSE.search(clean)
    if reason and numbers[0].end <= reason.start():
        numbers = [number for number in numbers if number.end <= reason.start()]
    alone = re.fullmatch(r"\W*\w+\W*", first_line.replace(numbers[0].text, "1", 1))
    if alone and re.match(r"\W*[^\W\d]", rest):
        return 0  # a bare first line with an explanation below
    breaks = [match.end() for match in _SENTENCE.finditer(clean) if match.end() <= numbers[-1].start]
    first = next(i for i, number in enumerate(numbers) if number.start >= (breaks[-1] if breaks else 0))
    turned = _TURN.search(clean[numbers[first].end : numbers[-1].start])
    if first == len(numbers) - 1 or (
        not turned and _LEAD.fullmatch(clean[breaks[-1] if breaks else 0 : numbers[first].start])
    ):
        return first
    times = [i for i, number in enumerate(numbers) if re.match(r"\s*(?:times?\b|次)", clean[number.end :])]
    return times[-1] if times else len(numbers) - 1
