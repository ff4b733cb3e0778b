"""Real parts around the offline paradigms: a trainer-like surrounding, prompts with trajectories, scripted answers."""

from __future__ import annotations

import types
from concurrent.futures import Future

import numpy as np

from datamodules.prompts import PromptTemplates
from datamodules.types import PreparedSample, Sample, StepBatch
from lightning_modules.offline.trajectories import Limits, TrajectoryReader
from rewards.base import Score
from rewards.router import RewardRouter
from rewards.tasks.ocr import OCR
from rollout.types import GenerateRequest, Response, SamplingSpec

QUESTION = "Is there a red frame?"


def prompt(processor, uid: str, offline: str | None = None, answer: str = "yes", **extra) -> PreparedSample:
    """A text sample, prepared as the data stage does it."""
    sample = Sample(uid, QUESTION, answer, "ocr", "text", offline_output=offline, extra=extra)
    messages = PromptTemplates("tiny").messages(sample)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tuple(processor.tokenizer(text)["input_ids"])
    return PreparedSample(sample, text, ids, ids)


def reader(processor, max_tokens: int = 16, more=None, **limits) -> TrajectoryReader:
    tokenizer = processor.tokenizer
    banned = tuple(tokenizer.convert_tokens_to_ids(t) for t in ("<|image_pad|>", "<|video_pad|>"))
    settings = Limits(max_tokens, banned, (tokenizer.eos_token_id,), **limits)
    return TrajectoryReader(processor, PromptTemplates("tiny"), settings, more)


def sampling(processor, n: int = 4, max_tokens: int = 16) -> SamplingSpec:
    return SamplingSpec(n=n, max_tokens=max_tokens, stop_ids=(processor.tokenizer.eos_token_id,))


def router() -> RewardRouter:
    """Exact text, accuracy only: a right answer totals 1.0."""
    return RewardRouter(routes={"ocr": OCR(metric="exact")}, accuracy_weight=1.0, format_weight=0.0)


def ready(callback, processor, n: int = 4, max_tokens: int = 16, more=None):
    """The callback as it is after `setup` and `on_fit_start`."""
    need = callback.weighting is not None and callback.weighting.needs_logprobs
    callback.sampling = sampling(processor, n, max_tokens)
    callback.check(callback.sampling)
    callback.reader = reader(processor, max_tokens, more, need_logprobs=need)
    callback._router = router()
    return callback


def requests(batch: StepBatch, spec: SamplingSpec) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{batch.rl_step}:{i}:{k}", p, spec, 100 * i + k)
        for i, p in enumerate(batch.prompts)
        for k in range(spec.n)
    ]


def answer(processor, text: str, **fields) -> Response:
    """A sampled answer that ends."""
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"] + [processor.tokenizer.eos_token_id]
    logprobs = np.full(len(ids), -0.5, np.float32)
    return Response(np.asarray(ids, np.int32), logprobs, "stop", text, 0, **fields)


def scored(accuracy: float, status: str = "ok") -> Score:
    return Score(accuracy, 1.0, accuracy, status=status)


def silent_trainer(**fields):
    """What callbacks read of a trainer."""
    return types.SimpleNamespace(is_global_zero=True, **fields)


def done(score: Score) -> Future:
    future: Future = Future()
    future.set_result(score)
    return future
