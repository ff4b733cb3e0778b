"""What a reward is: the `Score` that every scorer returns and the interface that a task type implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rewards.judge.client import Judge

Lane = Literal["inline", "process", "thread"]
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
    """Weighted sum that training maximises: 0.9 accuracy (or the type's own training reward) + 0.1 format by default,
    plus extra terms."""
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


@dataclass(frozen=True)
class Query:
    """One answer to be judged, as a task type sees it.

    Example: `Query(response="<answer>B</answer>", ground_truth="B", problem_type="multiple choice",
    options=("A. a cup", "B. a dog"))`.
    """

    response: str
    """What the policy wrote, untouched."""
    ground_truth: Any
    """The gold answer without tags; text, or an already parsed list or mapping."""
    problem_type: str
    """The type as the record spells it."""
    options: tuple[str, ...] = ()
    """Answer options with their letters; empty when the task has none."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Everything else known about the sample (question, tests, frame size, num_tokens, ...)."""
    benchmark: str | None = None
    """Benchmark the sample belongs to, for its protocol markers; None in training."""


@dataclass(frozen=True)
class Verdict:
    """A task type's judgement, before format and extra terms are added."""

    accuracy: float
    """In [0, 1]; 0 unless `status` is "ok"."""
    status: Status = "ok"
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, for logs."""
    reward: float | None = None
    """What training maximises in the place of accuracy; None = accuracy itself."""


def unparsable(reason: str) -> Verdict:
    """Verdict for an answer in which nothing could be read: accuracy 0 is meant."""
    return Verdict(0.0, "unparsable", reason)


class TaskReward(ABC):
    """One task type. A subclass implements `judge`; `well_formed` says what the answer tag must hold.

    Instances carry configuration only, never state: they are copied into the processes of the scoring pool.

    Args:
        aliases: further names of `problem_type` that this type answers to.
    """

    lane: ClassVar[Lane] = "inline"
    """Where judging happens: `inline` for cheap and harmless types; `process` for slow or hostile ones, in the pool of
    killable processes; `thread` for those that wait for a remote service and keep their own deadline."""

    def __init__(self, aliases: Sequence[str] = ()) -> None:
        self.aliases = tuple(aliases)

    @abstractmethod
    def judge(self, query: Query, answer: str) -> Verdict:
        """Judge `answer`, the part of the response that counts (no thinking, no tags)."""

    def well_formed(self, query: Query, answer: str) -> bool:
        """Whether `answer`, the content of the answer tag, is of the right kind; any text by default."""
        return bool(answer.strip())

    def time_limit(self, query: Query) -> float:
        """Wall-clock seconds after which the pool kills the judgement; only in the `process` lane."""
        return 10.0

    def warm_up(self) -> None:
        """Import what `judge` needs, so that the first judgement is not the slow one; nothing by default."""
        return


@runtime_checkable
class HasJudge(Protocol):
    """A task type that a language model judges; the router gives it its own judge where it has none."""

    judge_model: Judge | None
