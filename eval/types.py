"""What an evaluation leaves behind: one record per item, whatever happened to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["ok", "unparsed", "failed", "not_judged"]


@dataclass(frozen=True)
class EvalRecord:
    """One evaluated item, in exactly one final state.

    Example: an answer nobody can read is `EvalRecord(uid="charades:17", state="unparsed", accuracy=0.0, ...)` and
    counts 0; a broken video is "failed", counts 0 too and says why.
    """

    uid: str
    """The sample's identifier."""
    state: State
    """ok: judged; unparsed: no answer found; failed: no response or no verdict; not_judged: a judge is missing."""
    problem_type: str
    data_type: str
    """text, image, video or mixed."""
    data_source: str = ""
    accuracy: float = 0.0
    """In [0, 1]; 0 unless `state` is "ok"."""
    format: float = 0.0
    total: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components of the score."""
    response: str = ""
    answer: str = ""
    """Ground truth."""
    num_tokens: int = 0
    finish_reason: str = ""
    reason: str = ""
    """Why the state is not "ok"."""
