"""Open-ended answers: short gold answers by agreement, longer ones by ROUGE, or by a judge where one is configured."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.boolean import find_boolean
from rewards.extract.number import find_number, find_numbers, normalise
from rewards.extract.sections import boxed, plain
from rewards.extract.span import box_of, find_box, find_interval, interval_of
from rewards.extract.structured import find_structure
from rewards.geometry import box_iou, interval_iou
from rewards.tasks.numerical import numbers_agree

SHORT_WORDS = 4
PHRASE_WORDS = 15
_NEGATED = re.compile(r"\b(?:not|no|never|isn't|wasn't|neither|nor|without|cannot|except)\b", re.IGNORECASE)
_LISTING = re.compile(r",|;|/|\band\b|\bor\b", re.IGNORECASE)
_CONTRAST = re.compile(r"(?<=\w),?\s+(?:not|rather\s+than|instead\s+of)\s+[^.\n]*\.?\s*$", re.IGNORECASE)
_FORMULA = re.compile(r"(?=.*[()^=+*/])[\x21-\x7e\u00b2\u00b3]{1,60}")
_UNITS = frozenset(
    [
        "mm",
        "cm",
        "m",
        "km",
        "mg",
        "g",
        "kg",
        "ms",
        "s",
        "min",
        "h",
        "l",
        "ml",
        "hz",
        "khz",
        "v",
        "a",
        "w",
        "kw",
        "j",
        "n",
    ]
)
_ALTERNATIVES = re.compile(r"\bor\b|\band/or\b", re.IGNORECASE)
_CUE = re.compile(
    r"(?:final\s+answer|answer|conclusion|result|答案)\s*(?:is|was|are|:|=|是|为)+\s*:?\s*", re.IGNORECASE
)
_POLARITY = re.compile(r"\s*(?:yes|no|true|false)\s*\.?\s*", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def fold_answer(text: str) -> str:
    """Lower case without articles, punctuation, carets and superscript forms: "O(n^2)" and "O(n²)" become equal."""
    text = unicodedata.normalize("NFKC", plain(text)).casefold().replace("^", "")
    text = re.sub(r"[^\w\s.%+\-]", " ", text)
    text = re.sub(r"\.(?!\d)", " ", text)
    return re.sub(r"\s+", " ", _ARTICLE.sub(" ", text)).strip()


def stated_answer(text: str) -> str:
    """The part after the last "the answer is", the last boxed content, or the whole text."""
    boxes = boxed(text)
    if boxes:
        return boxes[-1][1]
    cues = list(_CUE.finditer(text))
    text = text[cues[-1].end() :] if cues else text
    return _CONTRAST.sub("", text) if len(text) < 200 else text


def _tokens(text: str) -> list[str]:
    """Lower-case words of any script; a script without spaces counts by character."""
    return _TOKEN.findall(text.lower())


def _f1(overlap: int, answer: int, gold: int) -> float:
    return 2.0 * overlap / (answer + gold) if answer and gold else 0.0


def rouge(answer: str, gold: str) -> dict[str, float]:
    """F1 of ROUGE-1, -2 and -L (Lin, 2004), each in [0, 1]; a gold of one token has no bigrams and leaves ROUGE-2 out.

    The longest common subsequence is rapidfuzz's: the usual package needs 40 ms of Python for two long descriptions.
    """
    from rapidfuzz.distance import LCSseq

    ours, theirs = _tokens(answer), _tokens(gold)
    parts = {}
    for n in (1, 2):
        grams = [Counter(zip(*(words[k:] for k in range(n)), strict=False)) for words in (ours, theirs)]
        overlap = (grams[0] & grams[1]).total()
        parts[f"rouge{n}"] = _f1(overlap, grams[0].total(), grams[1].total())
    if len(theirs) < 2:
        del parts["rouge2"]
    parts["rougeL"] = _f1(int(LCSseq.similarity(ours, theirs)), len(ours), len(theirs))
    return parts


class OpenEnded(TaskReward):
    """Free text. What the gold answer looks like decides how it is compared:

    interval: correct when tIoU > 0.7; box: when IoU > 0.5; number, with a unit at most: equal to two decimals; yes or
    no: same polarity; at most four words: the stated answer equals the gold, or its last sentence ends in it without
    negation or listing; anything longer: mean of ROUGE-1, -2 and -L (F1).

    Args:
        aliases: further names of the problem type.
        markers: per benchmark the words that its protocol wants in front of the answer; without them it is wrong.
    """

    def __init__(self, aliases: Sequence[str] = (), markers: Mapping[str, str] | None = None) -> None:
        super().__init__(aliases)
        self.markers = dict(markers or {})

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError for an empty gold."""
        gold = str(query.ground_truth).strip()
        if not gold:
            raise ValueError("the gold answer is empty")
        if not answer.strip():
            return unparsable("empty answer")
        marker = self.markers.get(query.benchmark or "")
        if marker and marker not in answer:
            return unparsable(f"{query.benchmark} asks for {marker!r} in front of the answer")
        exact = self._by_kind(answer, gold)
        if exact is not None:
            return Verdict(exact)
        return self.free_text(query, answer, gold)

    def free_text(self, query: Query, answer: str, gold: str) -> Verdict:
        """Verdict for a gold that is plain text."""
        if len(fold_answer(gold).split()) <= SHORT_WORDS and not _CJK.search(gold) and self._short(answer, gold):
            return Verdict(1.0)
        if len(gold.split()) <= SHORT_WORDS and any(
            hedge.search(stated_answer(answer)) and not hedge.search(gold) for hedge in (_NEGATED, _ALTERNATIVES)
        ):
            return Verdict(0.0)
        if _FORMULA.fullmatch(gold):  # parts of a formula are no partial answer
            return Verdict(float(f" {fold_answer(gold)} " in f" {fold_answer(stated_answer(answer))} "))
        # "The result is ..." inside a long description is a sentence of it, not an introduction to the answer.
        parts = rouge(stated_answer(answer) if len(gold.split()) <= PHRASE_WORDS else answer, gold)
        return Verdict(sum(parts.values()) / len(parts), parts=parts)

    def _by_kind(self, answer: str, gold: str) -> float | None:
        """Accuracy for a gold that is an interval, a box or a number; None for text."""
        value = find_structure(gold, (list,)) if gold.startswith("[") else None
        if value is not None:
            interval, box = interval_of(value), box_of(value)
            if interval is not None:
                found = find_interval(answer)[0]
                # A bracketed interval must not be reversed; prose is read in either order.
                said = find_structure(answer, (list,))
                ends = [float(x) for x in said if isinstance(x, (int, float))] if said else []
                reversed_ = len(ends) == 2 and ends[0] >= ends[1]
                return float(found is not None and not reversed_ and interval_iou(found, interval) > 0.7)
            if box is not None:
                other = find_box(answer)[0]
                return float(other is not None and box_iou(other, box) > 0.5)
        polarity = find_boolean(gold)[0] if _POLARITY.fullmatch(gold) else None
        if polarity is not None:
            return float(find_boolean(answer)[0] is polarity)
        return _number_with_unit(answer, gold)

    def _short(self, answer: str, gold: str) -> bool:
        wanted = fold_answer(gold)
        stated = stated_answer(answer)
        if fold_answer(stated).replace(" ", "") == wanted.replace(" ", ""):
            return True
        sentences = [s for s in re.split(r"\n|(?<=[.!?。])\s+", stated.strip()) if s.strip()]
        last = sentences[-1] if sentences else ""
        if _NEGATED.search(last) or _LISTING.search(last):
            return False
        return f" {fold_answer(last)}".endswith(f" {wanted}") and len(last.split()) <= 30


def _number_with_unit(answer: str, gold: str) -> float | None:
    """Accuracy for a gold such as "5", "twelve" or "12 m"; None for other golds and for units that may differ."""
    text = normalise(gold).strip().rstrip(".")
    numbers = find_numbers(text)
    if len(numbers) != 1 or numbers[0].start > 1:
        return None
    unit = text[numbers[0].end :].strip()
    if len(unit.split()) > 1 or not re.fullmatch(r"[^\d()\[\]^]*", unit):
        return None
    said = find_number(answer)[0]
    if said is None or not numbers_agree(said, numbers[0]):
        return 0.0
    behind = re.match(r"\s*([^\W\d_]+)", normalise(answer)[said.end :]) if said.end else None
    if unit and behind and {unit.lower(), behind.group(1).lower()} <= _UNITS:
        return float(unit.lower() == behind.group(1).lower())
    if unit and behind and behind.group(1)[0].lower() != unit[0].lower():
        return None
    return 1.0
