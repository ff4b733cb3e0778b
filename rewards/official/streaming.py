"""Official scorer of OVO-Bench."""

from __future__ import annotations

import re

from rewards.base import Query


def ovo_bench(query: Query) -> float:
    """Letter as substring; REC: all digits joined; SSR and CRR: exact Y/N or the case-sensitive word as substring."""
    kind, answer, target = query.problem_type.strip().upper(), query.response, str(query.ground_truth).strip()
    if kind == "REC":
        return float("".join(re.findall(r"\d+", answer)) == target)
    if kind in ("SSR", "CRR"):
        word = "Yes" if target.lower() in ("yes", "y", "1", "true") else "No"
        return float(answer == word[0] or word in answer)
    return float(target in answer)
