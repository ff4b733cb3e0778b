"""What each benchmark's own scorer does with one answer, mistakes included.

Used to align evaluation with published numbers, never for training. Every function takes a `Query` and returns an
accuracy, or None where the official rules leave the verdict to a language model (status "not_judged"). Random choices
of the originals are replaced by "wrong", so that scores repeat.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from rewards.base import Query, Verdict
from rewards.official import free_form, grounding, letters, numbers, streaming

Scorer = Callable[[Query], float | None]

_SCORERS: dict[str, Scorer] = {
    "Video-MME": letters.video_mme,
    "Video-MME-v2": letters.video_mme_v2,
    "MVBench": letters.mvbench,
    "TempCompass": free_form.tempcompass,
    "MotionBench": letters.motionbench,
    "LVBench": letters.lvbench,
    "LongVideoBench": letters.longvideobench,
    "MLVU": letters.mlvu,
    "Video-Holmes": letters.video_holmes,
    "MINERVA": letters.minerva,
    "VCR-Bench": free_form.vcr_bench,
    "VideoReasonBench": free_form.video_reason_bench,
    "LongVideo-Reason": letters.longvideo_reason,
    "MMVU": free_form.mmvu,
    "Video-MMMU": numbers.video_mmmu,
    "VideoMathQA": letters.video_math_qa,
    "VSI-Bench": numbers.vsi_bench,
    "Charades-STA": grounding.charades_sta,
    "STVG": grounding.stvg,
    "OVO-Bench": streaming.ovo_bench,
    "ODV-Bench": letters.odv_bench,
    "LiveSports-3K-QA": letters.livesports,
    "EasyVideoR1-common": free_form.common,
}
_ALIASES = {
    "Video-Holmes": ("holmes",),
    "MINERVA": ("minderva",),
    "MLVU": ("mlvu-dev", "mlvu-test"),
    "MMVU": ("mmvu-all",),
    "LongVideo-Reason": ("longvideo-reason-eval",),
    "STVG": ("st-align", "vidstg"),
    "LiveSports-3K-QA": ("livesports3k", "livesports"),
    "EasyVideoR1-common": ("easyvideor1", "common"),
}


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


_BY_KEY = {_key(name): name for name in _SCORERS}
_BY_KEY |= {_key(alias): name for name, aliases in _ALIASES.items() for alias in aliases}


def official_benchmarks() -> tuple[str, ...]:
    """Names of the benchmarks with an official scorer."""
    return tuple(_SCORERS)


def judge_official(query: Query) -> Verdict:
    """The official verdict. Raises ValueError for a missing or unknown benchmark, with the nearest names."""
    if not query.benchmark:
        raise ValueError(f"mode='official' needs `benchmark`, one of {', '.join(_SCORERS)}")
    name = _BY_KEY.get(_key(query.benchmark))
    if name is None:
        near = difflib.get_close_matches(_key(query.benchmark), _BY_KEY, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(_BY_KEY[key] for key in near)}?" if near else f"known: {', '.join(_SCORERS)}"
        raise ValueError(f"benchmark {query.benchmark!r} has no official scorer: {hint}")
    accuracy = _SCORERS[name](query)
    if accuracy is None:
        return Verdict(0.0, "not_judged", f"{name}'s rules leave this answer to a language model")
    if accuracy < 0:
        return Verdict(
            accuracy, "not_judged", f"{name} rates a failed judge call {accuracy:g} and leaves it out of means"
        )
    return Verdict(accuracy)
