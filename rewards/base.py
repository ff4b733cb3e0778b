"""What a reward is: the `Score` that every scorer returns and the interface that a task type implements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "unparsable", "timeout", "error", "not_judged"]


@dataclass(frozen=True)
class Score:
    """Outcome of scoring one response.

    Example: a right multiple-choice answer without the answer tag scores `accuracy=1.0, format=0.0, total=0.9`.
    """

    accuracy: float
    """In [0, 1]; 0 unless `status` is "ok"."""
    format: float
    """In [0, 1]: the answer stands where the prompt asked for it and has the right kind of content."""
    total: float
    """Weighted sum that training maximises (0.9 accuracy + 0.1 format by default, plus extra terms)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components (tiou, miou, overlong, ...), for logs."""
    status: Status = "ok"
    """ok: judged; unparsable: no answer found (accuracy 0 is meant); timeout, error, not_judged: no verdict, the
    group is masked from the update."""
    reason: str = ""
    """Why the status is not "ok", in words."""

    @property
    def has_verdict(self) -> bool:
        """Whether accuracy is a judgement (ok, unparsable) rather than a failure of scoring."""
        return self.status in ("ok", "unparsable")
