"""The objects that leave the rollout stage, and the two protocols that keep engines and consumers apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

    from datamodules.types import PreparedSample, StepBatch

FinishReason = Literal["stop", "length"]


class SampleError(RuntimeError):
    """One sample cannot be generated; the engine is idle and good for others.

    Training stops at it. Evaluation counts the sample as failed and goes on with the rest.
    """

    def __init__(self, uid: str, reason: str) -> None:
        super().__init__(f"sample {uid}: {reason}")
        self.uid = uid
        """Which sample."""
        self.reason = reason
        """Why, in words."""


@dataclass(frozen=True)
class SamplingSpec:
    """How responses are drawn. Comes from our config only, never from the model's generation_config."""

    n: int = 8
    """Responses per prompt."""
    temperature: float = 1.0
    """0 = greedy. The trainer divides its logits by the same value."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = off."""
    max_tokens: int = 512
    """Longest response in tokens, the end token included."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never sampled (vision placeholders); the trainer masks the same ids."""
    stop_ids: tuple[int, ...] = ()
    """A response ends after one of these tokens; the token is kept as its last one."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: at least one response per prompt is needed")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative; use 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 is off")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or -1 for off")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: a response holds at least one token")
        both = set(self.banned_ids) & set(self.stop_ids)
        if both:
            raise ValueError(f"token ids {sorted(both)} are both banned and stop tokens: such a response never ends")


@dataclass(frozen=True)
class GenerateRequest:
    """One response to be generated."""

    request_id: str
    """Unique among the requests in flight."""
    prompt: PreparedSample
    sampling: SamplingSpec
    """`n` is ignored: one request is one response."""
    seed: int
    """The engine's seed of this request; see datamodules.common.seeds."""


@dataclass(frozen=True)
class Response:
    """One sampled answer.

    Example: tokens `[17, 42, 2]` with finish reason "stop" end with the end token 2 and carry three log-probs.
    """

    token_ids: np.ndarray
    """int32 [L], as sampled; the stop token is included when `finish_reason == "stop"`."""
    logprobs: np.ndarray
    """float32 [L], log-probability of each token under the distribution sampled (temperature and ban applied)."""
    finish_reason: FinishReason
    text: str
    """Decoded without special tokens; for rewards and tables, never re-encoded."""
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as the engine expanded it; must equal `PreparedSample.expanded_ids`."""
    offline: bool = False
    """A trajectory from elsewhere (or from an earlier policy) instead of a sample of the policy. Its `logprobs` are the
    behaviour policy's where they are known, else NaN, which only a weighting that asks for them reads."""
    source: np.ndarray | None = None
    """bool [L], true where a token was not sampled by the policy (a given prefix); None = all alike, as `offline`."""

    @property
    def offline_mask(self) -> np.ndarray:
        """bool [L]: which tokens come from elsewhere."""
        import numpy as np

        return np.full(len(self.token_ids), self.offline) if self.source is None else self.source


@dataclass(frozen=True)
class RolloutGroup:
    """All responses to one prompt."""

    index: int
    """Place of the prompt in `StepBatch.prompts`."""
    prompt: PreparedSample
    responses: tuple[Response, ...]
    greedy: Response | None = None
    """Greedy response where the algorithm asks for a baseline (ReMax)."""

    @property
    def uid(self) -> str:
        """The sample's identifier."""
        return self.prompt.uid


class RolloutEditor(Protocol):
    """Changes what is generated and what a group holds, before any `GroupSink` sees it (see `subscribe_editor`)."""

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """Called first in every step; may append to `batch.prompts`."""
        ...

    def edit_requests(self, requests: list[GenerateRequest]) -> list[GenerateRequest]:
        """Drop or replace requests; ids stay `step:prompt:k`. A prompt keeps at least one."""
        ...

    def edit_group(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group, whose responses are those of the edited requests in order of k, or another one."""
        ...


class GroupSink(Protocol):
    """Receives groups while generation is still going on."""

    def put(self, group: RolloutGroup) -> None:
        """Take one finished group; must return quickly (heavy work goes to a pool)."""
        ...


class EngineFamily(Protocol):
    """What generation asks of a model family. Families live further down the line and are handed in."""

    def open(self, path: str) -> Self:
        """Read the configuration of the model at `path`; first of all."""
        ...

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that a response must not hold (vision placeholders and their delimiters)."""
        ...

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Ids that end a response."""
        ...

    def positions(
        self,
        input_ids: torch.Tensor,
        image_grids: Sequence[tuple[int, int, int]],
        video_grids: Sequence[tuple[int, int, int]],
        video_fps: Sequence[float] = (),
    ) -> torch.Tensor:
        """Rotary positions int64 [3, L] of one prompt int64 [L]."""
        ...

    def seconds_per_grid(self, video_fps: Sequence[float]) -> list[float]:
        """Seconds between temporal patches per video; empty where positions do not measure time."""
        ...

    def to_checkpoint_name(self, name: str) -> str:
        """Name in checkpoints of transformers' parameter `name`."""
        ...

    def checkpoint_names(self, folder: str | Path) -> frozenset[str]:
        """Names of the weights that a sync must bring."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A generator that lives in the trainer's process (vLLM, transformers).

    `generate` yields each response as soon as it is finished, in any order. All ranks of one tensor-parallel group
    pass identical requests.
    """

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[tuple[str, Response]]:
        """Yield (request_id, response) for every request."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint-format weights and reset every cache that depends on them."""
        ...

    def sleep(self) -> None:
        """Free device memory until `wake` (no-op without CUDA)."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


GenerateFn = Callable[["Sequence[GenerateRequest]"], "Iterator[tuple[str, Response]]"]
"""What evaluation needs of a generator: requests in, (request_id, response) out, in any order."""
