"""Experience replay: right answers of earlier steps come back where the policy now fails (cf. ExGRPO, 2510.02245)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from datamodules.common.seeds import uniform
from lightning_modules.offline.base import OfflineCallback, online_accuracy
from lightning_modules.offline.mix import replace_last
from lightning_modules.offline.schedule import check_share
from rewards.base import Score
from rollout.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from datamodules.types import StepBatch
    from lightning_modules.algorithms.weighting import OffPolicyWeighting
    from rollout.types import SamplingSpec

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give every id the same token and merge tokens alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {}
    # Truncation and padding are settings of a call, not of the vocabulary.
    content = {"vocabulary": sorted(tokenizer.get_vocab().items()), "model": rules.get("model", {})}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Experience:
    """One answer worth repeating."""

    uid: str
    """The sample it answers."""
    step: int
    """RL step in which it was sampled."""
    response: Response
    """As sampled, with the log-probs of the policy of that step."""
    score: Score


class ReplayBuffer:
    """The newest experience of each sample, at most `capacity` of them; the oldest leave first.

    Args:
        capacity: most experiences.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a replay buffer needs a capacity of at least 1, got {capacity}")
        self.capacity = capacity
        self._items: dict[str, Experience] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Experience) -> None:
        """Store `item`; what is too much leaves."""
        self._items.pop(item.uid, None)
        self._items[item.uid] = item
        while len(self._items) > self.capacity:
            del self._items[next(iter(self._items))]

    def get(self, uid: str) -> Experience | None:
        """The experience with a sample, or None."""
        return self._items.get(uid)

    def drop(self, unwanted: Callable[[Experience], bool]) -> int:
        """Forget the experiences that are `unwanted`; returns how many."""
        before = len(self._items)
        self._items = {uid: item for uid, item in self._items.items() if not unwanted(item)}
        return before - len(self._items)

    def uids(self) -> list[str]:
        """Samples in the buffer, the oldest first."""
        return list(self._items)

    def state(self) -> list[dict[str, Any]]:
        """Tensors and plain values."""
        return [
            {
                "uid": item.uid,
                "step": item.step,
                "token_ids": torch.as_tensor(item.response.token_ids),
                "logprobs": torch.as_tensor(item.response.logprobs),
                "text": item.response.text,
                "finish_reason": item.response.finish_reason,
                "seed": item.response.seed,
                "score": {**asdict(item.score), "parts": {str(k): float(v) for k, v in item.score.parts.items()}},
            }
            for item in self._items.values()
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state` returned, the newest `capacity` of it."""
        self._items.clear()
        for entry in state:
            response = Response(
                token_ids=entry["token_ids"].numpy(),
                logprobs=entry["logprobs"].numpy(),
                finish_reason=entry["finish_reason"],
                text=entry["text"],
                seed=int(entry["seed"]),
                offline=True,
            )
            self.add(Experience(entry["uid"], int(entry["step"]), response, Score(**entry["score"])))


class ReplayCallback(OfflineCallback):
    """Keeps right answers and, in groups that fail, replaces the last answer by a kept one to the same prompt.

    Each rank has its own buffer, saved with the checkpoint; on another number of ranks it starts empty. On data that is
    seen once, `prompts_per_step` brings prompts of kept answers back into the batch.

    Args:
        enable: the switch.
        capacity: most answers in a rank's buffer, one of each sample.
        min_accuracy: answers from this accuracy on are kept.
        group_threshold: accuracy of the online group below which it gets a kept answer.
        max_age: RL steps after which an answer is forgotten; None = never.
        prompts_per_step: prompts of kept answers that each rank adds to its batch.
        weighting: loss of the replayed tokens; the stored log-probs allow `ClippedRatio`.
        seed: of the choice of prompts.
    """

    fills_last_slot = True

    def __init__(
        self,
        enable: bool = True,
        capacity: int = 1024,
        min_accuracy: float = 1.0,
        group_threshold: float = 0.5,
        max_age: int | None = None,
        prompts_per_step: int = 0,
        weighting: OffPolicyWeighting | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(enable, weighting)
        if prompts_per_step < 0 or (max_age is not None and max_age < 1):
            raise ValueError(f"prompts_per_step={prompts_per_step} and max_age={max_age} must not be negative")
        self.buffer = ReplayBuffer(capacity)
        self.min_accuracy = check_share("min_accuracy", min_accuracy)
        self.group_threshold = check_share("group_threshold", group_threshold)
        self.max_age = max_age
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.fingerprint = ""
        self._data: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Know the tokenizer before a checkpoint is loaded."""
        super().on_fit_start(trainer, pl_module)
        if self.enable:
            self._data = trainer.datamodule
            self.fingerprint = tokenizer_fingerprint(self._data.processor.tokenizer)

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """Bring prompts of kept answers back."""
        if self.max_age is not None:
            oldest = batch.rl_step - self.max_age
            self.buffer.drop(lambda held: held.step < oldest)
        present = {prompt.uid for prompt in batch.prompts}
        candidates = [uid for uid in self.buffer.uids() if uid not in present]
        candidates.sort(key=lambda uid: uniform("offline", self.seed, batch.rl_step, uid))
        wanted = candidates[: self.prompts_per_step]
        samples = {s.uid: s for s in self._data.train_samples if s.uid in wanted} if wanted else {}
        added = 0
        for uid in wanted:
            if uid not in samples:
                continue  # the data set changed since the checkpoint
            try:
                batch.prompts.append(self._data.preparer.prepare(samples[uid]))
                added += 1
            except ValueError as error:
                # The user's media, as in the loader: said, counted, not replaced.
                batch.lost.append((uid, str(error)))
                log.warning("replayed sample %s is lost in step %d: %s", uid, batch.rl_step, error)
        batch.metrics["replay/prompts_count"] = float(added)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: StepBatch, batch_idx: int) -> None:
        """Replace in failing groups, then keep the new right answers."""
        if not self.enable:
            return
        replaced, kept, age = 0, [], 0
        for place, group in enumerate(batch.groups):
            accuracy = online_accuracy(group, batch.scores[place])
            if accuracy is None:
                continue
            rows = zip(group.responses, batch.scores[place], strict=True)
            right = next(((r, s) for r, s in rows if s.accuracy >= self.min_accuracy), None)
            if right is not None:
                kept.append((group.uid, *right))
            held = self.buffer.get(group.uid)
            if accuracy < self.group_threshold and held is not None:
                edited = replace_last(group, batch.scores[place], held.response, held.score)
                batch.groups[place], batch.scores[place] = edited
                replaced, age = replaced + 1, age + batch.rl_step - held.step
        for uid, response, score in kept:
            self.buffer.add(Experience(uid, batch.rl_step, _as_offline(response), score))
        batch.metrics |= {
            "replay/kept_count": float(len(kept)),
            "replay/replayed_count": float(replaced),
            "replay/size_count": float(len(self.buffer)),
        }
        if replaced:
            batch.metrics["replay/age"] = age / replaced
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def state_dict(self) -> dict[str, Any]:
        """This rank's buffer."""
        return {"tokenizer": self.fingerprint, "experiences": self.buffer.state()} if self.enable else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the buffer, without answers beyond today's response limit.

        Raises:
            ValueError: its tokens belong to another tokenizer.
        """
        if not self.enable:
            return
        if state_dict["tokenizer"] != self.fingerprint:
            raise ValueError(
                f"the checkpoint's replay buffer holds tokens of tokenizer {state_dict['tokenizer']}, the model has "
                f"{self.fingerprint or '(none yet)'}: resume with the same model, or start anew with resume=never"
            )
        self.buffer.load_state(state_dict["experiences"])
        limit = self.sampling.max_tokens
        if dropped := self.buffer.drop(lambda held: len(held.response.token_ids) > limit):
            log.warning("%d replayed answers are longer than max_tokens=%d: forgotten", dropped, limit)


def _as_offline(response: Response) -> Response:
    return Response(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        text=response.text,
        seed=response.seed,
        offline=True,
    )
