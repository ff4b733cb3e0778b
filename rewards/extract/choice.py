"""The chosen option of a multiple-choice answer, read against the options that really exist."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rewards.extract.choice_patterns import choice_patterns
from rewards.extract.number import find_number, parse_number
from rewards.extract.sections import boxed, plain

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DEFAULT = tuple("ABCDEFGHIJ")
_NAMED = re.compile(
    r"\s*(?:option|sentence|caption|choice|statement|video)\s+(\d{1,2}|[A-Za-z])\s*[:.)\-]?\s*(.*)", re.I | re.S
)
_LABEL = re.compile(r"\s*[(\[]?\s*(\d{1,2}|[A-Za-z])\s*[)\]]?\s*(?:[).:：、．\]]\s*|$)(.*)", re.S)


@dataclass(frozen=True)
class OptionSet:
    """Labels and texts of the options, in order; `texts[i]` is "" where only the label is known."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    assumed: bool = False
    """True when the record lists no options and the labels are a guess."""


@lru_cache(maxsize=4096)
def parse_options(options: tuple[str, ...], gold: str = "") -> OptionSet:
    """Split "A. a cup", "(B) a dog", "C: x", "Option 1: y" into label and text; options without labels get A, B, ...

    Without options the labels A to J are assumed, and the gold letter beyond them.
    """
    if not options:
        label = gold.strip().upper()[:1]
        extra = (label,) if label in _LETTERS and label and label not in _DEFAULT else ()
        return OptionSet(_DEFAULT + extra, ("",) * len(_DEFAULT + extra), assumed=True)
    clean = [unicodedata.normalize("NFKC", option) for option in options]
    for pattern in (_NAMED, _LABEL):
        matches = [pattern.fullmatch(option) for option in clean]
        if all(matches):
            labels = tuple(m.group(1).upper() for m in matches if m)
            ordered = labels == tuple(_LETTERS[: len(labels)]) or all(label.isdigit() for label in labels)
            if len(set(labels)) == len(labels) and (
                ordered or pattern is _NAMED or all(not x.isdigit() for x in labels)
            ):
                return OptionSet(labels, tuple(m.group(2).strip() for m in matches if m))
    if len(clean) > len(_LETTERS):
        raise ValueError(f"{len(clean)} options: at most {len(_LETTERS)} can be lettered")
    return OptionSet(tuple(_LETTERS[: len(clean)]), tuple(option.strip() for option in clean))


def gold_label(gold: str, options: OptionSet) -> str:
    """Label of the gold answer, given as label, as "B. text" or as option text. Raises ValueError when it is none."""
    clean = unicodedata.normalize("NFKC", str(gold)).strip()
    if clean.upper() in options.labels:
        return clean.upper()
    for pattern in (_NAMED, _LABEL):
        match = pattern.fullmatch(clean)
        if match and match.group(1).upper() in options.labels:
            return match.group(1).upper()
    same = [
        label for label, text in zip(options.labels, options.texts, strict=True) if text and fold(text) == fold(clean)
    ]
    if len(same) == 1:
        return same[0]
    raise ValueError(f"the gold answer {gold!r} is none of the labels {', '.join(options.labels)} and no option's text")


def fold(text: str) -> str:
    """Text for comparison: NFKC, lower case, no punctuation at the edges, single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"\s+", " ", text).strip()
    return text.strip(" \t.,;:!?\"'()[]{}*`_。，；：！？“”‘’")


_HTML = re.compile(r"<(b|i|u|p|em|strong|span|code)>([^<]{0,500})</\1>", re.I)
_WORDS = re.compile(r"[^\W_]+")
_CONNECTIVES = ("AND", "OR", "OPTION", "OPTIONS", "BOTH", "EITHER", "ALL")
_SENTENCE = re.compile(r"\n|(?<=[.!?。])\s+")


def find_choice(text: str, options: OptionSet) -> tuple[str | None, str]:
    """Label of the option that `text` chooses, and why it chooses none.

    In this order: the whole text is a label; the last explicit statement ("the answer is (B)", "B is correct",
    `\\\\boxed{B}`, "选B"); a leading label ("B. a dog"); the only label in brackets; the only label standing alone;
    the only option whose text occurs. Lists of options and several labels are no choice.
    """
    clean = _HTML.sub(r"\2", plain(text)).strip()
    if not clean:
        return None, "empty answer"
    patterns = choice_patterns(options.labels)
    bare = patterns["bare"].fullmatch(clean)
    if bare:
        return bare.group("l").upper(), ""
    whole = _by_text(clean, options, exact=True)
    if whole:
        return whole, ""
    words = {word if len(word) == 1 else word.upper() for word in _WORDS.findall(clean[:400])}
    if len(words & set(options.labels)) > 1 and words <= {*options.labels, *_LETTERS, *_CONNECTIVES}:
        return None, f"lists {', '.join(sorted(words & set(options.labels)))}"
    label, reason = _explicit(clean, options, patterns)
    if label or reason:
        return label, reason
    listed = {m.group("l") for m in patterns["line"].finditer(clean)}
    if len(listed) > 1:
        return None, "lists several options without choosing one"
    sentences = [part for part in _SENTENCE.split(clean) if part.strip()]
    finals = [patterns["bare"].fullmatch(part) for part in sentences]
    named = {match.group("l").upper() for match in finals if match}
    if finals and finals[-1] and len(named) == 1:
        return named.pop(), ""
    if len(named) > 1 and all(finals):
        return None, f"lists {', '.join(sorted(named))}"
    label, reason = _leading(clean, options, patterns)
    if label or reason:
        return label, reason
    label, reason = _standing_alone(clean, options, patterns)
    if label or reason:
        return label, reason
    label = _by_text(clean, options, exact=False) or _by_value(clean, options) or _by_place(clean, options)
    label = label or _by_elimination(clean, options, patterns)
    return (label, "") if label else (None, "no option recognised")


def _explicit(clean: str, options: OptionSet, patterns: dict[str, re.Pattern[str]]) -> tuple[str | None, str]:
    """The last explicit statement; ("", reason) style: a reason means that the statement names several options."""
    statements: list[tuple[int, int, str]] = []
    for start, content in boxed(clean):
        inner = patterns["bare"].fullmatch(content) or patterns["lead"].match(content.strip())
        if inner and patterns["join"].match(content.strip(), inner.end("l")):
            return None, "boxes several options"
        label = inner.group("l").upper() if inner else _by_text(content, options, exact=True)
        if label:
            statements.append((start, clean.find(content, start) + len(content) + 1, label))
    for match in patterns["cue"].finditer(clean):
        raw = match.group("p") or match.group("l")
        ends_clause = re.match(r"\s*(?:$|[.,;:!?)\]\n])", clean[match.end() : match.end() + 8])
        if match.group("l") and raw.islower() and not ends_clause:
            continue
        if match.group("l") and raw in ("A", "I") and not _letter_not_word(clean, match.end(), raw, options):
            continue
        statements.append((match.start("p") if match.group("p") else match.start("l"), match.end(), raw.upper()))
    for match in patterns["after"].finditer(clean):
        if match.group("l").isupper() or match.group("l").isdigit():
            statements.append((match.start("l"), match.end("l"), match.group("l").upper()))
    rejected = _rejected(clean, patterns)
    statements = sorted(s for s in statements if s[0] not in rejected)
    if not statements:
        texts = _stated_text(clean, options)
        return texts, ""
    start, end, label = statements[-1]
    if len(statements) > 1 and statements[-2][2] != label and _OR.fullmatch(clean[statements[-2][1] : start]):
        return None, "states several options"
    if _joined(clean, _behind_text(clean, end, label, options), rejected, patterns):
        return None, "names several options in one statement"
    return label, ""


_OR = re.compile(r"[\s}.$*)\]]*(?:,|/|\bor\b|\band\b)[\s$*(\[\\]*")


def _joined(clean: str, end: int, rejected: set[int], patterns: dict[str, re.Pattern[str]]) -> bool:
    """Whether another label is joined at `end` that is not named in order to be dismissed: "B, A is wrong"."""
    match = patterns["join"].match(clean, end)
    return match is not None and rejected.isdisjoint(range(match.start(), match.end()))


def _behind_text(clean: str, end: int, label: str, options: OptionSet) -> int:
    """`end`, or the position behind the option's text where that follows its label: "A. pushing, B. pulling"."""
    text = options.texts[options.labels.index(label)]
    match = re.compile(r"[\s).:\]]*" + re.escape(text), re.I).match(clean, end) if text else None
    return match.end() if match else end


def _rejected(clean: str, patterns: dict[str, re.Pattern[str]]) -> set[int]:
    """Positions of labels that are named in order to be dismissed: "A is wrong", "not A", "rather than A"."""
    found = [*patterns["wrong"].finditer(clean), *patterns["against"].finditer(clean)]
    return {m.start("l") for m in found if m.group("l").isupper() or m.group("l").isdigit()}


_TEXT_CUE = re.compile(r"\b(?:answer|option|choice)\s*(?:is|would be|should be|:)+\s*", re.I)


def _stated_text(clean: str, options: OptionSet) -> str | None:
    """Option whose text follows the last "the answer is"."""
    cues = list(_TEXT_CUE.finditer(clean))
    if not cues:
        return None
    tail = re.split(r"\n|(?<=[.!?])\s", clean[cues[-1].end() :], maxsplit=1)[0]
    return _by_text(tail, options, exact=True) or _by_text(tail, options, exact=False)


def _letter_not_word(text: str, end: int, letter: str, options: OptionSet) -> bool:
    """Whether a capital A or I is an option's label rather than the article or pronoun that begins a phrase."""
    following = text[end : end + 200]
    if re.match(
        r"\s*(?:$|[.,;:!?。)\]\n(/\-–—\u3400-\u9fff])|\s+(?:because|since|as|is|was|and|or|for|due|which|with)\b",
        following,
    ):
        return letter == "A" or not re.match(r"\s+(?:was|and)\b", following)
    position = options.labels.index(letter) if letter in options.labels else -1
    return position >= 0 and bool(options.texts[position]) and fold(following).startswith(fold(options.texts[position]))


def _leading(clean: str, options: OptionSet, patterns: dict[str, re.Pattern[str]]) -> tuple[str | None, str]:
    """A label at the very beginning, with its text or an explanation behind it."""
    match = patterns["lead"].match(clean)
    if not match:
        return None, ""
    label, delimiter = match.group("l"), match.group("d")
    opened = clean[0] in "([{"
    if delimiter.strip() == "" and "\n" not in delimiter and not opened and not match.group("noun"):
        if label in ("A", "I") and not _letter_not_word(clean, match.end("l"), label, options):
            return None, ""
        if label.isdigit():
            return None, ""
    rejected = _rejected(clean, patterns)
    if match.start("l") in rejected:
        return None, ""
    if _joined(clean, _behind_text(clean, match.end("l"), label, options), rejected, patterns):
        return None, "names several options"
    return label, ""


def _standing_alone(clean: str, options: OptionSet, patterns: dict[str, re.Pattern[str]]) -> tuple[str | None, str]:
    """The only label in brackets, else the only label that stands alone, rejected ones not counted."""
    rejected = _rejected(clean, patterns)
    for name in ("paren", "alone"):
        found = [m for m in patterns[name].finditer(clean) if m.start("l") not in rejected]
        if name == "alone":
            found = [m for m in found if not m.group("l").isdigit()]
            found = [
                m
                for m in found
                if m.group("l") not in ("A", "I") or _letter_not_word(clean, m.end("l"), m.group("l"), options)
            ]
        labels = list(dict.fromkeys(m.group("l") for m in found))
        if len(labels) == 1:
            return labels[0], ""
        if labels:
            parts = [part for part in re.split(r"[,;]", clean) if part.strip()]
            last = patterns["bare"].fullmatch(parts[-1])
            if last and len(parts) > 1 and not patterns["tail"].search(parts[-2]):
                return last.group("l").upper(), ""
            return None, f"mentions {', '.join(labels)}"
    return None, ""


_ARTICLE = re.compile(r"^(?:a|an|the)\s+")
_NEGATION = re.compile(
    r"\b(?:not|isn't|no|never|neither|nor|without|wasn't|aren't)\s+(?:(?!but\b|rather\b)\w+\s+){0,2}$|(?:不是|没有|并非)$",
    re.I,
)
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


def _by_text(text: str, options: OptionSet, *, exact: bool) -> str | None:
    """Label of the only option whose text is `text` (exact) or occurs in it as whole words, longest match first."""
    folded = _ARTICLE.sub("", fold(text))
    texts = (_ARTICLE.sub("", fold(text)) for text in options.texts)
    known = [(label, t) for label, t in zip(options.labels, texts, strict=True) if t]
    if exact:
        same = [label for label, t in known if t == folded]
        return same[0] if len(same) == 1 else None
    covered = bytearray(len(folded))  # characters that belong to a longer option's text
    hits: list[str] = []
    for label, t in sorted(known, key=lambda pair: -len(pair[1])):
        edge = ("", "") if _UNSPACED.search(t) else (r"(?<![\w.])", r"(?!\w|\.\d)")
        for match in re.finditer(edge[0] + re.escape(t) + edge[1], folded):
            if all(covered[match.start() : match.end()]):
                continue
            covered[match.start() : match.end()] = b"\1" * len(match.group())
            if not _NEGATION.search(folded[max(0, match.start() - 60) : match.start()]):
                hits.append(label)
    unique = set(hits)
    return unique.pop() if len(unique) == 1 else None


def _by_value(text: str, options: OptionSet) -> str | None:
    """Label of the only option that equals the answer's number, where every option is a number."""
    values = [parse_number(option) if option else None for option in options.texts]
    if any(value is None for value in values):
        return None
    said = find_number(text)[0]
    same = [
        label
        for label, value in zip(options.labels, values, strict=True)
        if said is not None and value is not None and value.value == said.value
    ]
    return same[0] if len(same) == 1 else None


def _by_elimination(text: str, options: OptionSet, patterns: dict[str, re.Pattern[str]]) -> str | None:
    """Label of the only option that is not dismissed: "A is wrong, B is wrong, D is wrong" of four."""
    rejected = {text[position] for position in _rejected(text, patterns)}
    left = [label for label in options.labels if label not in rejected]
    return left[0] if rejected and len(left) == 1 and not options.assumed else None


_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")
_PLACE = re.compile(
    rf"\b(?:the\s+)?({'|'.join(_PLACES)}|last)\s+(?:option|choice|answer|sentence|caption|statement|one)\b", re.I
)


def _by_place(text: str, options: OptionSet) -> str | None:
    """Label of the only option that is named by its place: "the second option"."""
    if options.assumed:
        return None
    found = {
        m.group(1).lower()
        for m in _PLACE.finditer(text)
        if not _NEGATION.search(text[max(0, m.start() - 60) : m.start()])
    }
    if len(found) != 1:
        return None
    place = found.pop()
    index = len(options.labels) - 1 if place == "last" else _PLACES.index(place)
    return options.labels[index] if index < len(options.labels) else None


def as_options(options: Sequence[str] | Mapping[str, str] | None) -> tuple[str, ...]:
    """Options of a record as a tuple of labelled texts; None and empty strings are dropped.

    Raises ValueError for a number in their place.
    """
    if isinstance(options, (int, float)):
        raise ValueError(f"options={options!r}: use a list of options or a mapping from label to text")
    if isinstance(options, Mapping):
        return tuple(f"{label}. {text}" for label, text in options.items())
    return tuple(str(option) for option in options or () if str(option).strip())
