"""VideoReasonBench: operations on hidden states, judged or simulated (Liu et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.records import Record
from eval.benchmarks.base import Benchmark, finished
from eval.benchmarks.drafts import Draft
from eval.benchmarks.judged import ask_judge
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.simulator import NoTargetError, reaches_target
from eval.benchmarks.source import Source
from eval.benchmarks.types import BenchmarkItem
from rewards.base import Score
from rewards.extract.sections import read_answer

if TYPE_CHECKING:
    from rewards.router import RewardRouter

MARKER = "Final Answer"
SIMULATED = "prediction_operation"
_OPERATIONS = "what sequence of"


@dataclass(frozen=True, kw_only=True)
class VideoReasonBench(Benchmark):
    """The text behind "Final Answer" is judged; asked-for operations have no gold and are simulated.

    The reference's files hold no states: their 240 operation questions cannot be scored and are "not judged".
    """

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """One per question, with its world and level."""
        for record in records:
            draft = self.draft(record, source, media)
            path = Path(str(record.get("video") or record.get("path")))
            dim = record.get("dim") or (SIMULATED if _OPERATIONS in draft.question else "")
            simulated = dim == SIMULATED
            meta = {**record, "dim": dim, "world": path.parent.name}
            answer = "" if simulated else draft.answer
            # Without states an operation question ends as "not judged", which is what a judge's absence means too.
            yield replace(
                draft,
                answer=answer,
                meta=meta,
                problem_type="open-ended",
                needs_judge=not simulated or not record.get("states"),
                gold_ok=bool(answer) or bool(simulated and record.get("states")),
            )

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """Simulate, or ask the judge about the text behind the marker; without the marker the answer is wrong."""
        answer = read_answer(response).text
        if MARKER not in answer:
            missing = Score(0.0, 0.0, 0.0, status="unparsable", reason=f"no {MARKER!r} in the answer")
            return finished(missing), finished(missing)
        final = answer.rpartition(MARKER)[2].lstrip(": *\n")
        question = str(item.sample.extra["question"])
        if item.meta.get("dim") == SIMULATED:
            verdict = finished(self._simulated(item, question, final))
        elif not final:
            verdict = finished(Score(0.0, 0.0, 0.0, status="unparsable", reason=f"nothing stands behind {MARKER!r}"))
        else:
            verdict = ask_judge(self, item, final, router, item.sample.answer, question)
        return verdict, verdict

    def _simulated(self, item: BenchmarkItem, question: str, final: str) -> Score:
        try:
            right = reaches_target(str(item.meta["world"]), question, item.meta, final)
        except NoTargetError as error:
            return Score(0.0, 0.0, 0.0, status="not_judged", reason=str(error))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return Score(0.0, 0.0, 0.0, status="error", reason=f"the record of {item.uid} is broken: {error}")
        if right is None:
            return Score(0.0, 0.0, 0.0, status="unparsable", reason="no operations in the answer")
        return Score(float(right), float(right), float(right), parts={"simulated": 1.0})
