"""Official scorers of the benchmarks with free-form answers; what their rules leave open, a language model decides."""

from __future__ import annotations

import re
import string

from rewards.base import Query
from rewards.extract.choice import parse_options
from rewards.extract.structured import find_structure
from rewards.geometry import box_iou, interval_iou
from rewards.judge.replies import LETTERS, binary_verdict, captioning_verdict, correct_word
from rewards.official.letters import gold
from rewards.tasks.numerical import Numerical


def tempcompass(query: Query) -> float | None:
    """Rules per format; None where they find no answer and the language model decides."""
    kind = re.sub(r"[\s_\-]+", " ", query.problem_type.casefold())
    if "judge reply" in kind:
        reply, target = query.response, str(query.ground_truth)
        return captioning_verdict(reply, target) if "captioning" in kind else correct_word(reply)
    answer, target = query.response, str(query.ground_truth)
    if kind.startswith("yes no") or kind == "boolean":
        said = next((word for word in ("yes", "no") if answer.lower().startswith(word)), None)
        return None if said is None else float(said == target)
    if "caption" in kind:
        return None if kind == "captioning" else _caption_matching(query)
    if answer == target:
        return 1.0
    if answer in tuple(LETTERS) or answer[:2] in {f"{letter}{mark}" for letter in LETTERS for mark in ".)"}:
        return float(answer[0] == target[:1])
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


def vcr_bench(query: Query) -> float | None:
    """On an extracted answer: intervals by tIoU > 0.7, boxes of integers by IoU > 0.5, the rest by the model."""
    mine, theirs = _plain_list(query.response), _plain_list(str(query.ground_truth))
    if mine is None or theirs is None or len(mine) != len(theirs):
        return None
    if len(mine) == 2:
        return float(interval_iou((mine[0], mine[1]), (theirs[0], theirs[1])) > 0.7)
    return float(box_iou((mine[0], mine[1], mine[2], mine[3]), (theirs[0], theirs[1], theirs[2], theirs[3])) > 0.5)


def _plain_list(text: str) -> list[float] | None:
    text = text.strip()
    value = find_structure(text, (list,)) if text.startswith("[") and text.endswith("]") else None
    kinds = (int, float) if value is not None and len(value) == 2 else (int,)
    if value is None or len(value) not in (2, 4) or not all(type(x) in kinds for x in value):
        return None
    return [float(x) for x in value]


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
    mine_o, theirs_o = (re.search(r"o\s*\([^)]+\)", t) for t in (said, wanted))
    return mine_o is not None and theirs_o is not None and mine_o.group(0) == theirs_o.group(0)


def common(query: Query) -> float:
    """The shared rules: numbers equal after a sane parse, and binary judge replies."""
    if "judge" in query.problem_type.casefold():
        return binary_verdict(query.response)
    return Numerical().judge(query, query.response).accuracy
