"""Official letter extractors of the multiple-choice benchmarks."""

from __future__ import annotations

import re

from rewards.base import Query
from rewards.extract.choice import as_options, gold_label, parse_options

_SHORT = ("The best answer is", "The correct answer is", "The answer is", "The answer")
_OPTIONS = ("The best option is", "The correct option is")
_BEST = ("Best answer:", "Best option:")
# Two commas are missing in the published lists: neighbouring strings grow together and can never match.
_GLUED = ("The best option isThe correct option is", "Best answer:Best option:")


def gold(query: Query) -> str:
    """The gold letter."""
    text = str(query.ground_truth).strip()
    if re.fullmatch(r"[A-Z]", text):
        return text
    return gold_label(text, parse_options(as_options(query.options), text))


def first_letter(text: str, letters: str, prefixes: tuple[str, ...]) -> str:
    """First of `letters` that is left, anywhere, once every prefix has been removed."""
    text = text.strip()
    for prefix in prefixes:
        text = text.replace(prefix, "")
    match = re.search(f"[{letters}]", text)
    return match.group(0) if match else ""


def _hit(found: str, query: Query) -> float:
    return float(bool(found) and found == gold(query))


def video_mme(query: Query) -> float:
    """First A-D after stripping answer prefixes."""
    prefixes = (*_SHORT, *_GLUED[:1], "Best answer:Best option:", "Answer:", "Option:")
    return _hit(first_letter(query.response, "A-D", prefixes), query)


def video_mme_v2(query: Query) -> float:
    """First A-H after stripping answer prefixes."""
    prefixes = ("Final Answer:", *_SHORT, *_OPTIONS, *_BEST, "Answer:", "Option:")
    return _hit(first_letter(query.response, "A-H", prefixes), query)


def longvideobench(query: Query) -> float:
    """First A-E after stripping answer prefixes; the original's random choice counts as wrong."""
    return _hit(first_letter(query.response, "A-E", (*_SHORT, *_OPTIONS, *_BEST)), query)


def video_math_qa(query: Query) -> float:
    """First A-E after stripping answer prefixes."""
    return _hit(first_letter(query.response, "A-E", (*_SHORT, *_GLUED)), query)


_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def _vqa_letter(text: str) -> str:
    """VQA-style normalisation, then the first letter A-E standing alone in either case ("a dog" gives A)."""
    match = re.match(r"^([A-E])\.\s*(.+)$", text.strip(), re.IGNORECASE)
    if match:
        return match.group(1).upper()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    out = text
    grouped = re.search(r"\d,\d", text) is not None
    for mark in _PUNCTUATION:
        drop = grouped or f"{mark} " in text or f" {mark}" in text
        out = out.replace(mark, "" if drop else " ")
    # The original passes re.UNICODE (32) as the maximum number of replacements.
    out = re.sub(r"(?!<=\d)(\.)(?!\d)", "", out, count=32)
    out = out.strip("'").strip('"').strip(")").strip("(").strip().lower()
    match = re.search(r"\b([a-e])\b", out)
    return match.group(1).upper() if match else out


def mvbench(query: Query) -> float:
    """Normalised answers compared."""
    return float(_vqa_letter(query.response) == _vqa_letter(gold(query)))


def odv_bench(query: Query) -> float:
    """As MVBench; empty answers, which the original leaves out of the mean, count as wrong."""
    return mvbench(query)


def motionbench(query: Query) -> float:
    """Upper-cased text: first letter A-F alone, else first before punctuation, else first anywhere."""
    text = query.response.split("</think>")[-1].strip().upper()
    for prefix in ("THE BEST ANSWER IS", "THE CORRECT ANSWER IS", "THE ANSWER IS", "BEST ANSWER:", "ANSWER:"):
        text = text.replace(prefix, "")
    for pattern in (r"\b([A-F])\b", r"([A-F])[.):]", r"([A-F])"):
        match = re.search(pattern, text)
        if match:
            return _hit(match.group(1), query)
    return 0.0


def minerva(query: Query) -> float:
    """Last "answer is/option: X" in any case, else the last A-E anywhere."""
    text = query.response.strip()
    stated = re.findall(r"(?:answer|option)\s*(?:is|:)\s*([ABCDE])", text, re.IGNORECASE)
    if stated:
        return _hit(stated[-1].upper(), query)
    for prefix in (*_SHORT[:3], "Answer:", "Option:", "Therefore, the final answer is:"):
        text = text.replace(prefix, "")
    found = re.findall("[ABCDE]", text)
    return _hit(found[-1], query) if found else 0.0


def video_holmes(query: Query) -> float:
    """Last answer tag: first of A-F with a space, colon or bracket, else first letter present; no tag is wrong."""
    tags = re.findall(r"<answer>\s*(.*?)\s*</answer>", query.response, re.DOTALL)
    if not tags:
        return 0.0
    text = tags[-1].strip()
    for letter in "ABCDEF":
        if f"{letter} " in text or f"{letter}:" in text or f"[{letter}" in text:
            return _hit(letter, query)
    for letter in "ABCDEF":
        if letter in text:
            return _hit(letter, query)
    return 0.0


def mlvu(query: Query) -> float:
    """The character before the first closing bracket, else the whole answer."""
    text = query.response
    if ")" in text:
        index = text.index(")")
        text = text[index - 1 : index] if index else ""
    return _hit(text, query)


def livesports(query: Query) -> float:
    """The first character; an empty answer, on which the original crashes, is wrong."""
    return _hit(query.response[:1], query)


def longvideo_reason(query: Query) -> float:
    """Exact text of the answer tag or of the whole response, one known prefix removed."""
    match = re.search(r"<answer>(.*?)</answer>", query.response, re.DOTALL)
    text = (match.group(1) if match else query.response).strip()
    text = text.replace("Therefore the final answer is:", "").strip()
    return float(text == str(query.ground_truth).strip())


def lvbench(query: Query) -> float:
    """The ranked extractor; for the type "... (official polish)" the authors' own truncation."""
    if "polish" in query.problem_type.casefold():
        return _hit(_polished(query.response), query)
    return _hit(ranked_letter(query.response, "ABCD"), query)


def _polished(text: str) -> str:
    """Text before ")", after "(", first token, first character."""
    text = text.strip()
    if ")" in text:
        text = text[: text.index(")")]
    if "(" in text:
        text = text[text.index("(") + 1 :]
    words = text.split()
    return words[0][:1] if words else ""


_RANKED_PHRASES = (
    *(
        f"{article}{kind} {noun} is"
        for article in ("the ", "")
        for kind in ("correct", "best")
        for noun in ("answer", "option")
    ),
    *("the answer is", "answer is", "the choice is", "choice is", "the correct choice is", "correct choice is"),
    *("i choose", "i select", "i pick", "my answer is", "my choice is"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)


def ranked_letter(text: str, letters: str) -> str:
    """Letter with the best (format, position).

    Ranks: start 10, end 9, after a phrase 7, "(A)" 6, "A." 5, "A:" 4, "A)" 3, "A " 2, anywhere 0. Within
    a format the last occurrence wins, except that after a phrase every letter's next occurrence counts, words
    included.
    """
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    if not text:
        return ""
    padded, core = f" {text} ", text.strip()
    ranked: list[tuple[int, int, str]] = []
    for letter in letters:
        for rank, form in (
            (6, f"({letter})"),
            (5, f"{letter}."),
            (4, f"{letter}:"),
            (3, f"{letter})"),
            (2, f"{letter} "),
        ):
            if form in padded:
                ranked.append((rank, padded.rfind(form), letter))
        for phrase in _RANKED_PHRASES:
            index = padded.lower().find(phrase)
            position = padded.find(letter, index + len(phrase)) if index != -1 else -1
            if position != -1:
                ranked.append((7, position, letter))
        if core.startswith(letter) and (len(core) == 1 or not core[1].isalpha()):
            ranked.append((10, 0, letter))
        if core.endswith(letter) and (len(core) == 1 or not core[-2].isalpha()):
            ranked.append((9, len(padded) - 1, letter))
    if not ranked:
        ranked = [(0, padded.rfind(letter), letter) for letter in letters if letter in padded]
    # Python's stable sort with reverse keeps the earlier letter first among equals.
    return max(ranked, key=lambda entry: entry[:2])[2] if ranked else ""
