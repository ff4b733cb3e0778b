"""Yes or no in free text."""

from __future__ import annotations

import re

from rewards.extract.sections import boxed, plain

_TRUE = r"yes|yeah|yep|true|correct|right|是的|是|对|對|正确|有"
_FALSE = (
    r"not\s+(?:yet|really|true|correct|right|the\s+case)"
    r"|no(?!\s+(?:doubt|problem|wonder)\b)|nope|false|incorrect|wrong|不是的|不是|否|不对|不對|错误|没有"
)
_SURE = r"(?:definitely|absolutely|certainly|of\s+course)"
_BARE = re.compile(
    rf"\W*(?:(?P<t>{_TRUE}|y|t|1|{_SURE}|i\s+(?:think|believe)\s+so)"
    rf"|(?P<f>{_FALSE}|n|f|0|(?:{_SURE}|probably)\s+not|not\s+at\s+all|i\s+(?:do\s+not|don['’]t)\s+(?:think|believe)\s+so))\W*",
    re.IGNORECASE,
)
_LEAD = re.compile(rf"\W*(?:(?P<f>{_FALSE})|(?P<t>{_TRUE}))(?!\w)", re.IGNORECASE)
_CUE = re.compile(
    r"(?:\b(?:answer|verdict|statement|claim|conclusion|it|this|that|response)\b\s*(?:is|['’]s|would be|:|=)+"
    r"|答案(?:是|为|:)?|\b(?:therefore|thus|so|hence|finally)\b,?:?|(?<!n['’]t\s)(?<!not\s)\bsay\b,?:?)\s*[\"'(\[]*"
    rf"(?P<v>(?P<f>{_FALSE})|(?P<t>{_TRUE}))(?!\w)",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"\b(?:is|was)(?:n't|\s+not)\s+(?:\w+\s+)?(?:(?P<f>true|correct|right|the\s+case)|(?P<t>false|incorrect|wrong))\b",
    re.IGNORECASE,
)
_SPOKEN = re.compile(
    r"(?:(?<=[,;:.!?\-(\"'])\s*|^\s*|\b(?:actually|wait|rather|i\s+mean|sorry|says|hence|think|believe"
    r"|certainly|perhaps|probably|definitely|clearly|maybe|possibly|a|a\s+(?:clear|definite|firm|simple))\s+)"
    r"(?:(?P<f>not\s+yet|no|nope|false)|(?P<t>yes|yeah|yep|true))(?=\s*(?:[.,;:!?)\"']|$|from\s+me))",
    re.IGNORECASE | re.MULTILINE,
)
_BOTH = re.compile(
    rf"\b(?:{_TRUE})\b\s*(?:and\s+also|and|or|/|,?\s*and/or|but also)\s*\b(?:{_FALSE})\b"
    rf"|\b(?:{_FALSE})\b\s*(?:and\s+also|and|or|/|but also)\s*\b(?:{_TRUE})\b",
    re.IGNORECASE,
)
_ASKED = re.compile(r"\b(?:yes\s+or\s+no|true\s+or\s+false)\s*\?", re.IGNORECASE)
_CORRECTION = re.compile(r"\b(?:wait|actually|correction|rather|on second thought|sorry|i mean)\b", re.IGNORECASE)
_UNSURE = re.compile(
    r"\b(?:not (?:sure|certain|clear|possible|enough)|unsure|uncertain|cannot|can't|unclear|unknown|i don't know)\b",
    re.IGNORECASE,
)


def find_boolean(text: str) -> tuple[bool | None, str]:
    """Whether `text` says yes or no, and why it says neither.

    A bare word, then the last cue ("the answer is no"), then a leading word (a later one only after a correction such
    as "wait"), then the last word that stands as a clause of its own. "Yes and no" and "not sure" are no answer.
    """
    clean = _ASKED.sub("", plain(text)).strip()
    boxes = boxed(clean)
    if boxes:
        clean = boxes[-1][1].strip()
    bare = _BARE.fullmatch(clean)
    if bare:
        return bare.group("t") is not None, ""
    words = set(re.findall(r"\w+", clean[:200].lower()))
    if _BOTH.search(clean) or words == {"yes", "no"}:
        return None, "both yes and no"
    lead = _LEAD.match(clean)
    cues = [m for m in _CUE.finditer(clean) if not (lead and "would be" in m.group().lower())]
    cues = sorted([*cues, *_NEGATED.finditer(clean)], key=lambda m: m.end())
    if cues:
        return cues[-1].group("t") is not None, ""
    spoken = list(_SPOKEN.finditer(clean))
    correction = _CORRECTION.search(clean)
    corrected = [m for m in spoken if correction and m.end() > correction.end()]
    if corrected:
        return corrected[-1].group("t") is not None, ""
    if lead:
        return lead.group("t") is not None, ""
    if spoken and not _UNSURE.search(clean[spoken[-1].end() :]):
        return spoken[-1].group("t") is not None, ""
    last = _BARE.fullmatch(re.split(r"\n|(?<=[.!?。])\s+", clean)[-1])
    if last:
        return last.group("t") is not None, ""
    return None, "neither yes nor no"
