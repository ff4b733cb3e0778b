"""Greedy evaluation of prepared batches through any `GenerateFn`, scored by the training's router."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datamodules.common.seeds import response_seed
from eval.benchmarks.types import STATES, State
from rollout.types import GenerateFn, GenerateRequest, Response, SampleError, SamplingSpec

if TYPE_CHECKING:
    from datamodules.types import Sample, StepBatch
    from rewards.base import Score
    from rewards.router import RewardRouter

log = logging.getLogger(__name__)


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


def evaluate_batches(
    batches: Iterable[StepBatch],
    samples: Mapping[str, Sample],
    generate: GenerateFn,
    router: RewardRouter,
    sampling: SamplingSpec,
    seed: int = 0,
    timeout: float = 300.0,
) -> list[EvalRecord]:
    """Answer and score every sample of `batches`; this rank's records in their order.

    Args:
        batches: prepared prompts; what could not be prepared is in `lost` and becomes a failed record.
        samples: all samples by uid (the lost ones are known by uid only).
        generate: the engine; called once per batch, or more often when a sample fails in it.
        router: the scorer of the training.
        sampling: how the one response per sample is drawn; temperature 0 for greedy.
        seed: of the responses when the temperature is not 0.
        timeout: seconds to wait for outstanding scores of a batch.
    """
    records: list[EvalRecord] = []
    for batch in batches:
        records += [_record(samples[uid], reason=reason) for uid, reason in batch.lost]
        requests = [
            GenerateRequest(f"eval:{i}", prompt, sampling, response_seed(seed, 0, prompt.uid, 0))
            for i, prompt in enumerate(batch.prompts)
        ]
        scores: dict[str, tuple[Response, Future[Score]]] = {}
        reasons: dict[str, str] = {}
        for request, response in generate_tolerantly(requests, generate, reasons):
            scores[request.request_id] = (response, router.submit_response(request.prompt.sample, response))
        wait([future for _, future in scores.values()], timeout=timeout)
        for request in requests:
            sample = request.prompt.sample
            if request.request_id in scores:
                response, future = scores[request.request_id]
                score = future.result() if future.done() else None
                records.append(_record(sample, response, score, f"no verdict within {timeout:g} s"))
            else:
                records.append(_record(sample, reason=reasons[request.request_id]))
    return records


def generate_tolerantly(
    requests: Sequence[GenerateRequest], generate: GenerateFn, reasons: dict[str, str]
) -> Iterable[tuple[GenerateRequest, Response]]:
    """Yield (request, response); a sample that the engine refuses is left out, the others are asked for again.

    Ranks that share an engine see the same failure and repeat together.

    Args:
        requests: one per sample.
        generate: the engine.
        reasons: receives {request id: reason} of the refused ones, and of those that got no answer.

    Raises:
        SampleError: the engine refuses a sample that nobody asks about any more.
    """
    open_requests = {request.request_id: request for request in requests}
    refused: set[str] = set()
    while True:
        try:
            for request_id, response in generate(list(open_requests.values())):
                yield open_requests.pop(request_id), response
        except SampleError as error:
            log.warning("evaluation: %s", error)
            if error.uid in refused:  # its rank has left it out since: it would be refused forever
                raise
            refused.add(error.uid)
            for request_id, request in list(open_requests.items()):
                if request.prompt.uid == error.uid:  # else another rank's, which leaves it out
                    del open_requests[request_id]
                    reasons[request_id] = error.reason
            continue
        reasons |= dict.fromkeys(open_requests, "the engine returned nothing")
        return


def summarise(records: Sequence[EvalRecord]) -> dict[str, float]:
    """Scalars under `val/`. Failed and unparsed items stay in every denominator with accuracy 0.

    Items that nobody judged are in no denominator; a mean over nothing else is left out.
    """
    if not records:
        return {}
    judged = [record for record in records if record.state != "not_judged"]
    metrics = {
        "val/response_length": sum(r.num_tokens for r in records) / len(records),
        "val/items": float(len(records)),
    }
    if judged:
        metrics["val/accuracy_mean"] = _mean(judged)
        metrics["val/format_mean"] = sum(r.format for r in judged) / len(judged)
        metrics["val/total_mean"] = sum(r.total for r in judged) / len(judged)
    for state in ("failed", "unparsed", "not_judged"):
        metrics[f"val/{state}"] = float(sum(record.state == state for record in records))
    if visual := [record for record in judged if record.data_type != "text"]:
        metrics["val/accuracy_visual"] = _mean(visual)
    for prefix, attribute in (("accuracy", "problem_type"), ("accuracy_by_source", "data_source")):
        parts: dict[str, list[EvalRecord]] = defaultdict(list)
        for record in judged:
            if name := getattr(record, attribute):
                parts[name.replace(" ", "_")].append(record)
        metrics |= {f"val/{prefix}/{name}": _mean(part) for name, part in sorted(parts.items())}
    return metrics


def complete(records: Sequence[EvalRecord], samples: Sequence[Sample]) -> list[EvalRecord]:
    """One record per sample in the samples' order; a sample that nobody answered is failed, with the reason.

    Raises:
        RuntimeError: two records for one sample, or a record of an unknown one.
    """
    found: dict[str, EvalRecord] = {}
    known = {sample.uid for sample in samples}
    for record in records:
        if record.uid in found or record.uid not in known:
            raise RuntimeError(f"evaluation has a record too many for sample {record.uid}; ranks shared out wrongly")
        found[record.uid] = record
    return [found.get(s.uid) or _record(s, reason="no rank evaluated it") for s in samples]


def _mean(records: Sequence[EvalRecord]) -> float:
    return sum(record.accuracy for record in records) / len(records)


def _record(
    sample: Sample, response: Response | None = None, score: Score | None = None, reason: str = ""
) -> EvalRecord:
    state: State = "failed" if score is None else STATES.get(score.status, "failed")
    return EvalRecord(
        uid=sample.uid,
        state=state,
        problem_type=sample.problem_type,
        data_type=sample.data_type,
        data_source=sample.data_source,
        accuracy=score.accuracy if score and state == "ok" else 0.0,
        format=score.format if score else 0.0,
        total=score.total if score else 0.0,
        parts=dict(score.parts) if score else {},
        response=response.text if response else "",
        answer=sample.answer,
        num_tokens=len(response.token_ids) if response else 0,
        finish_reason=response.finish_reason if response else "",
        reason=score.reason if score else reason,
    )
