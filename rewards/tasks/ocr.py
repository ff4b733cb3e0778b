"""OCR: 1 - word error rate, by characters for scripts without spaces, or exact match."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from rewards.base import Query, TaskReward, Verdict, unparsable

# Han, kana, Thai, Lao, Myanmar, Khmer: words are not separated by spaces.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")


def unspaced(text: str) -> bool:
    """Whether at least half of the letters belong to a script that is written without spaces."""
    letters = sum(char.isalnum() for char in text)
    return bool(letters) and 2 * len(_UNSPACED.findall(text)) >= letters


_WRAP = re.compile(
    r"(?:[^\"'`*“‘「]{0,60}\b(?:reads|says|text|answer|written)\b[^\"'`*“‘「]{0,12})?"
    r"(?:```\w*\n(?P<fence>.*?)\n?```|(?P<mark>\*\*|[`\"'*])(?P<marked>.*?)(?P=mark)"
    r"|“(?P<curly>[^”]*)”|‘(?P<single>[^’]*)’|「(?P<corner>[^」]*)」)\s*\.?",
    re.DOTALL | re.IGNORECASE,
)
_MARKS = ("```", "**", "`", '"', "“", "‘", "「")


def unwrapped(answer: str, gold: str) -> str:
    """Text inside quotes, bold marks or a fence that enclose the whole answer, unless the gold has them too."""
    match = None if gold.lstrip().startswith((*_MARKS, "'", "*")) else _WRAP.fullmatch(answer.strip())
    inner = (
        next((text for name, text in match.groupdict().items() if text is not None and name != "mark"), "")
        if match
        else ""
    )
    return inner if inner.strip() and not any(mark in inner for mark in _MARKS) else answer


class OCR(TaskReward):
    """Reads text: `max(0, 1 - errors / units of the gold)`, units being words, or characters in unspaced scripts.

    Args:
        aliases: further names of the problem type.
        metric: wer, or exact for 1 only on equality.
        ignore_case: compare case-folded.
    """

    def __init__(
        self, aliases: Sequence[str] = (), metric: Literal["wer", "exact"] = "wer", ignore_case: bool = True
    ) -> None:
        super().__init__(aliases)
        if metric not in ("wer", "exact"):
            raise ValueError(f"metric={metric!r}: use wer or exact")
        self.metric, self.ignore_case = metric, ignore_case

    def _clean(self, text: str) -> str:
        text = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip()
        return text.casefold() if self.ignore_case else text

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError for an empty gold."""
        import jiwer

        gold, text = self._clean(str(query.ground_truth)), self._clean(unwrapped(answer, str(query.ground_truth)))
        if not gold:
            raise ValueError("the gold text is empty")
        if not text:
            return unparsable("empty answer")
        if self.metric == "exact":
            return Verdict(float(text == gold))
        if text == gold:
            return Verdict(1.0)
        if unspaced(gold):
            gold, text = gold.replace(" ", ""), text.replace(" ", "")
            error = jiwer.cer(gold, text)
        else:
            error = jiwer.wer(gold, text)
        return Verdict(max(0.0, 1.0 - float(error)), parts={"error_rate": float(error)})
