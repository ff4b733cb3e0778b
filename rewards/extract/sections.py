"""Which part of a response is the answer: thinking is dropped, the last answer tag is opened."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

MAX_ANSWER_CHARS = 20_000
"""Only this many characters at the end of the answer part are read: a longer text cannot hide or dilute an answer."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]{1,40}\|>")


@dataclass(frozen=True)
class Answer:
    """The parts of one response.

    Example: `"<think>two red ones</think><answer>2</answer>"` gives `text="2", tagged=True, think="closed"`.
    """

    text: str
    """What counts as the answer; empty when thinking never ended."""
    tagged: bool
    """Whether `text` stood in a closed answer tag."""
    think: Literal["none", "closed", "open"]
    """Whether there was thinking, and whether it ended."""
    num_tags: int
    """Opening answer tags outside the thinking."""
    tail: str
    """Text after the last answer tag."""
    head: str
    """Text between the thinking and the first answer tag."""
    thought: str
    """Text of the thinking."""


def read_answer(response: str) -> Answer:
    """Split a response. A chat template may open the thinking in the prompt, so a lone closing tag counts."""
    marks = list(_THINK.finditer(response))
    think: Literal["none", "closed", "open"] = "none"
    body, thought = response, ""
    if marks:
        if not marks[-1].group(1):
            return Answer("", False, "open", 0, "", "", response[marks[-1].end() :])
        think = "closed"
        body = response[marks[-1].end() :]
        start = marks[0].end() if not marks[0].group(1) else 0
        thought = response[start : marks[-1].start()]
    tags = list(_ANSWER.finditer(body))
    num_tags = sum(1 for tag in tags if not tag.group(1))
    opened: re.Match[str] | None = None
    last: tuple[int, int, int] | None = None
    for tag in tags:
        if not tag.group(1):
            opened = tag
        elif opened is not None:
            last, opened = (opened.end(), tag.start(), tag.end()), None
    if last is not None:
        text, tail = body[last[0] : last[1]], body[last[2] :]
        return Answer(_clean(text), True, think, num_tags, _clean(tail), body[: tags[0].start()].strip(), thought)
    text = body if opened is None else body[opened.end() :]
    if opened is not None and len(tags) > 1 and not _clean(text):  # "<answer>C<answer>": closed by the wrong tag
        text = body[tags[-2].end() : opened.start()]
    return Answer(_clean(text), False, think, num_tags, "", "", thought)


def _clean(text: str) -> str:
    return _SPECIAL.sub(" ", text[-MAX_ANSWER_CHARS:]).strip()


_MARKUP = re.compile(r"(?<!\d)\*+|\*+(?!\s?\d)|`+|(?<!\w)_+|_+(?!\w)|^\s{0,3}#+\s+|^\s{0,3}>\s?", re.MULTILINE)
_LATEX_WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|operatorname|mathit|textit|mbox)\s*\{([^{}]{0,200})\}")


def plain(text: str) -> str:
    """NFKC text without markdown emphasis, LaTeX text wrappers and math delimiters; `\\boxed{...}` stays."""
    text = unicodedata.normalize("NFKC", text)
    text = _MARKUP.sub("", text)
    text = _LATEX_WRAP.sub(r"\1", text)
    for mark in ("\\(", "\\)", "\\[", "\\]", "$", "\\,", "\\;", "\\!", "\u200b", "\ufeff"):
        text = text.replace(mark, "")
    return text


_BRACES = re.compile(r"\\?boxed\s*\{|[{}]")


def boxed(text: str) -> list[tuple[int, str]]:
    """Position and content of every `\\boxed{...}`, braces balanced, inner ones before outer ones; one pass."""
    found: list[tuple[int, str]] = []
    stack: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        if match.group() == "}":
            opened = stack.pop() if stack else None
            if opened is not None and match.start() - opened[1] < 2_000:
                found.append((opened[0], text[opened[1] : match.start()]))
        else:
            stack.append((match.start(), match.end()) if len(match.group()) > 1 else None)
    return found
