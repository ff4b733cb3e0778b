"""Official rules of the benchmarks that hand undecided answers to a language model, and the parsers of its replies."""

from __future__ import annotations

import re
import string

from rewards.base import Query
from rewards.extract.choice import parse_options
from rewards.extract.structured import find_structure
from rewards.geometry import box_iou
from rewards.official.letters import gold

_LETTERS = "ABCD"


def tempcompass(query: Query) -> float | None:
    """Rules per format; None where they find no answer and the language model decides."""
    kind = re.sub(r"[\s_\-]+", " ", query.problem_type.casefold())
    if "judge reply" in kind:
        return _captioning(query) if "captioning" in kind else correct_word(query.response)
    if kind.startswith("yes no") or kind == "boolean":
        return _yes_no(query)
    if "caption" in kind:
        return None if kind == "captioning" else _caption_matching(query)
    return _tempcompass_choice(query)


def _tempcompass_choice(query: Query) -> float | None:
    answer, target = query.response, str(query.ground_truth)
    if answer == target:
        return 1.0
    if answer in tuple(_LETTERS) or answer[:2] in {f"{x}{mark}" for x in _LETTERS for mark in ".)"}:
        return float(answer[0] == target[:1])
    return None


def _yes_no(query: Query) -> float | None:
    answer = query.response.lower()
    for word in ("yes", "no"):
        if answer.startswith(word):
            return float(word == str(query.ground_truth))
    return None


def _caption_matching(query: Query) -> float | None:
    """Whole option, its sentence, or its index; the last kind that matches is what was said."""
    answer, target = query.response, str(query.ground_truth)
    said = None
    heads = [option.split(": ")[0] for option in query.options]
    sentences = [option.split(": ", 1)[1].split(": ")[0] if ": " in option else option for option in query.options]
    if answer in query.options:
        said = answer
    behind = answer.split(") ")[1] if ") " in answer else None
    for sentence in sentences:
        if sentence in (answer, behind):
            said = sentence
    indices = [*heads, *(re.sub(r"(?:Sentence|Option|Caption) ", "", head) for head in heads)]
    for index in indices:
        if index in (answer, answer.replace(".", "")):
            said = index
    if said is None:
        return None
    head, _, sentence = target.partition(": ")
    return float(said in (target, target.split(":")[0], sentence.split(": ")[0], head.split()[-1]))


def _captioning(query: Query) -> float:
    """Option in the last "Answer" line equals the gold's, with one option letter in it; -1 for an empty reply."""
    reply = query.response
    if not reply or reply == "invalid_request_error":
        return -1.0
    lines = [line.strip().replace("Answer:", "").strip() for line in reply.split("\n") if "Answer" in line]
    answer = lines[-1] if lines else reply
    letters = sum(answer.count(f"{letter}.") for letter in _LETTERS)
    return float(letters == 1 and answer.split(". ")[0] == str(query.ground_truth).split(". ")[0])


def correct_word(reply: str) -> float:
    """1 for "Correct" without "Incorrect", or in front of it; case-sensitive."""
    if reply.startswith("Correct"):
        return 1.0
    return float("Correct" in reply and "Incorrect" not in reply)


def vcr_bench(query: Query) -> float | None:
    """On an extracted answer: intervals by tIoU > 0.7, boxes of integers by IoU > 0.5, the rest by the model."""
    mine, theirs = _plain_list(query.response), _plain_list(str(query.ground_truth))
    if mine is None or theirs is None or len(mine) != len(theirs):
        return None
    if len(mine) == 2:
        return float(_hull_iou(mine, theirs) > 0.7)
    return float(box_iou((mine[0], mine[1], mine[2], mine[3]), (theirs[0], theirs[1], theirs[2], theirs[3])) > 0.5)


def _plain_list(text: str) -> list[float] | None:
    text = text.strip()
    value = find_structure(text, (list,)) if text.startswith("[") and text.endswith("]") else None
    kinds = (int, float) if value is not None and len(value) == 2 else (int,)
    if value is None or len(value) not in (2, 4) or not all(type(x) in kinds for x in value):
        return None
    return [float(x) for x in value]


def _hull_iou(a: list[float], b: list[float]) -> float:
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def video_reason_bench(query: Query) -> float | None:
    """Without the case-sensitive marker "Final Answer" wrong; the text behind it goes to the model."""
    return None if "Final Answer" in query.response else 0.0


_SUPERSCRIPTS = str.maketrans({digit: f"^{i}" for i, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def mmvu(query: Query) -> float:
    """The lenient rules in front of the judge: mentions, substrings in both directions, numbers within 0.01."""
    if query.options:
        return float(_mmvu_choice(query))
    return float(_mmvu_open(query.response, str(query.ground_truth)))


def _mmvu_choice(query: Query) -> bool:
    answer, target = query.response.strip(), gold(query)
    first = re.search(r"\b([A-E])\b", answer, re.IGNORECASE)
    if first and first.group(1).upper() == target:
        return True
    if re.search(rf"\b{target}\b", answer, re.IGNORECASE):
        return True
    known = parse_options(query.options)
    text = known.texts[known.labels.index(target)].strip().lower()
    lowered = answer.lower()
    if text in lowered:
        return True
    words = [w.strip(string.punctuation) for w in text.split() if len(w.strip(string.punctuation)) > 2]
    return target in answer.upper() and any(word in lowered for word in words)


def _mmvu_open(answer: str, target: str) -> bool:
    said, wanted = (" ".join(t.strip().lower().translate(_SUPERSCRIPTS).split()) for t in (answer, target))
    if wanted in said or said in wanted:
        return True
    mine, theirs = re.findall(r"\d+\.?\d*", said), re.findall(r"\d+\.?\d*", wanted)
    if mine and theirs and abs(float(mine[0]) - float(theirs[0])) < 0.01:
        return True
    said_words, wanted_words = (
        [w.strip(string.punctuation) for w in t.split() if w.strip(string.punctuation)] for t in (said, wanted)
    )
    if 2 <= len(wanted_words) <= 5 and all(w in said_words for w in wanted_words if len(w) > 2):
        return True
    big_o = [re.search(r"o\s*\([^)]+\)", t) for t in (said, wanted)]
    return all(big_o) and big_o[0].group(0) == big_o[1].group(0)  # type: ignore[union-attr]


def binary_verdict(reply: str) -> float:
    """1 when a judge's reply says "Judgement: 1", whatever the markdown, case and spacing; else 0."""
    text = re.sub(r"[*_`#]", "", reply)
    found = re.findall(r"judge?ment\s*(?:[:：=]|is)\s*[\[(\"']?\s*([01])(?![\d.]*\d)", text, re.IGNORECASE)
    if found:
        return float(found[-1])
    return float(text.strip() == "1")


def common(query: Query) -> float:
    """The shared rules: numbers equal after a sane parse, and binary judge replies."""
    if "judge" in query.problem_type.casefold():
        return binary_verdict(query.response)
    from rewards.tasks.numerical import Numerical

    return Numerical().judge(query, query.response).accuracy
