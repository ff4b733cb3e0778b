"""From an official record to a question: options in every published form, the gold letter, clips."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.types import MediaRef
from rewards.extract.choice import fold

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTERED = re.compile(r"\s*[(\[]?([A-Z])\s*[.:)\]]+\s*(.*)", re.S)
_LINE = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]*(.*)$", re.M)
_BRACKET = re.compile(r"\(([A-Z])\)\s*")


@dataclass(frozen=True)
class Draft:
    """A question before a prompt style gives it its words.

    Example: `Draft(uid="videomme:001-1", question="What ...?", answer="C", texts=("Apples.", "Candles."), ...)`.
    """

    uid: str
    question: str
    """The question alone, without options and without instructions."""
    answer: str
    """The gold answer in the form the scorer wants (a letter where there are options); "" = there is none."""
    problem_type: str
    texts: tuple[str, ...] = ()
    """Texts of the options in order; letter i of the alphabet belongs to text i."""
    raw_options: tuple[str, ...] = ()
    """Options with labels of their own ("Option 1: ..."), instead of `texts`."""
    videos: tuple[MediaRef, ...] = ()
    images: tuple[MediaRef, ...] = ()
    folder_fps: float | None = None
    """Frames per second of videos that are folders of frames."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The official record."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields for the scorer and the templates (frame size, coordinate system, ...)."""
    needs_judge: bool = False
    gold_ok: bool = True
    """False when the gold is absent or none of the options."""

    @property
    def letters(self) -> tuple[str, ...]:
        """One letter per option."""
        return tuple(LETTERS[: len(self.texts)])

    @property
    def options(self) -> tuple[str, ...]:
        """ "A. text" per option, or the options with their own labels."""
        return self.raw_options or tuple(
            f"{letter}. {text}" for letter, text in zip(self.letters, self.texts, strict=True)
        )


def letter_list(letters: Sequence[str]) -> str:
    """ "A, B, C, or D", "A or B", "A": the letters as an instruction names them."""
    if len(letters) < 3:
        return " or ".join(letters)
    return f"{', '.join(letters[:-1])}, or {letters[-1]}"


def option_texts(value: Any) -> tuple[str, ...]:
    """Texts of the options without their letters.

    Args:
        value: a list with or without letters, a mapping letter -> text, a string with one option per line, or None.

    Raises:
        ValueError: more options than letters, or a form that is none of these.
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        # Parquet fills absent letters of a mapping with null.
        items = [(str(key).strip(), text) for key, text in value.items() if text is not None and str(text).strip()]
        texts = [str(text).strip() for _, text in sorted(items)]
    elif isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        return option_texts(_literal(value))
    elif isinstance(value, str):
        if value.strip().lower() in ("none", "nan", "null"):
            return ()
        inline = inline_options(value)[1]
        texts = list(inline) or [line.strip() for line in value.splitlines() if line.strip()]
    elif isinstance(value, Sequence):
        texts = [str(text).strip() for text in value if text is not None]
    else:
        raise ValueError(f"options {value!r} are not a list, a mapping or a text")
    if len(texts) > len(LETTERS):
        raise ValueError(f"{len(texts)} options: at most {len(LETTERS)} can be lettered")
    matches = [_LETTERED.fullmatch(text) for text in texts]
    if texts and all(m and m.group(1) == LETTERS[i] for i, m in enumerate(matches)):
        return tuple(m.group(2).strip() for m in matches if m)
    return tuple(texts)


def inline_options(text: str) -> tuple[str, tuple[str, ...]]:
    """(question, option texts) of a question whose options stand in it, "(A) ..." or "A. ..." line by line.

    Example: `inline_options("What year?\\n(A) 1636\\n(B) 1366") == ("What year?", ("1636", "1366"))`.
    """
    for pattern in (_LINE, _BRACKET):
        marks = list(pattern.finditer(text))
        starts = [i for i, mark in enumerate(marks) if mark.group(1) == "A"]
        for first in reversed(starts):
            run = [m for i, m in enumerate(marks[first:]) if m.group(1) == LETTERS[i : i + 1]]
            if len(run) >= 2 and len(run) == len(marks) - first:
                begins = [m.start(2) if pattern is _LINE else m.end() for m in run]
                ends = [m.start() for m in run[1:]] + [len(text)]
                found = tuple(text[b:e].strip() for b, e in zip(begins, ends, strict=True))
                return text[: run[0].start()].strip(), found
    return text.strip(), ()


def gold_letter(answer: Any, texts: Sequence[str], form: str = "auto") -> str:
    """The gold answer as a letter.

    Args:
        answer: a letter ("C", "(C)", "C. text", "<answer>C</answer>"), the text of an option, or its 0-based index.
        texts: the options.
        form: `letter`, `text`, `index`, or `auto`: a letter where it is one, else a text.

    Raises:
        ValueError: the answer is absent or none of the options.
    """
    letters = LETTERS[: len(texts)]
    if form == "index":
        number = int(answer) if str(answer).strip().lstrip("-").isdigit() else -1
        if 0 <= number < len(letters):
            return letters[number]
        raise ValueError(f"the gold index {answer!r} is outside 0..{len(letters) - 1}")
    text = strip_tags(answer)
    if form in ("auto", "letter"):
        match = re.fullmatch(r"[(\[]?([A-Za-z])[)\].:]*", text) or re.match(r"[(\[]?([A-Z])[)\].:]+\s", text)
        if match and match.group(1).upper() in letters:
            return match.group(1).upper()
    if form in ("auto", "text"):
        folded = [fold(option) for option in texts]
        if text in texts:
            return letters[texts.index(text)]
        if fold(text) in filter(None, folded):
            return letters[folded.index(fold(text))]
    raise ValueError(f"the gold answer {answer!r} is none of {', '.join(letters) or 'no options'}")


def gold_of(answer: Any, texts: Sequence[str] = (), form: str = "plain") -> tuple[str, bool]:
    """(gold answer, whether it is one). Without options, or as `plain`, it is taken as it is."""
    if form != "plain" and texts:
        try:
            return gold_letter(answer, texts, form), True
        except ValueError:
            return strip_tags(answer), False
    text = strip_tags(answer)
    return text, bool(text)


def strip_tags(answer: Any) -> str:
    """The content of `<answer>` tags, or the text itself."""
    match = re.search(r"<answer>(.*?)</answer>", str(answer), re.S)
    return (match.group(1) if match else "" if answer is None else str(answer)).strip()


def _literal(text: str) -> Any:
    """A list or mapping written as JSON or as Python text, as cells of TSV files hold them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"options {text[:80]!r} are neither JSON nor a list") from error
