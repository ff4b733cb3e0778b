"""Answers written elsewhere, as the policy would have to write them: checked, templated, tokenised."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from datamodules.records import read_records
from rewards.extract.sections import read_answer
from rollout.types import Response

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from datamodules.prompts import PromptTemplates
    from datamodules.types import PreparedSample

log = logging.getLogger(__name__)

Reason = Literal[
    "not_text", "empty", "no_answer", "placeholder", "wrong_template", "too_long", "unknown_sample", "logprobs", "score"
]

# Turn and sequence markers of the usual chat formats; none of them belongs inside an answer.
_CHAT_MARKUP = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|endoftext|begin_of_text|user|assistant|system|end"
    r"|start|channel|message|return|header_start|header_end|eot)\|>"
    r"|<｜[^｜>]{1,40}｜>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)


@dataclass(frozen=True)
class Trajectory:
    """One usable answer of another policy.

    Example: the text `<answer>B</answer>` has the ids of its tokens and, at the end, that of `<|im_end|>`.
    """

    uid: str
    """The sample it answers."""
    text: str
    """What the reward reads."""
    token_ids: np.ndarray
    """int32 [L], end token included."""
    logprobs: np.ndarray
    """float32 [L] under the policy that wrote it; NaN = unknown."""

    def response(self) -> Response:
        """The trajectory in the form of a rollout."""
        return Response(self.token_ids, self.logprobs, "stop", self.text, seed=0, offline=True)


class RejectedError(ValueError):
    """A trajectory that cannot be used; training goes on without it."""

    def __init__(self, uid: str, reason: Reason, detail: str) -> None:
        super().__init__(f"offline trajectory of sample {uid} rejected ({reason}): {detail}")
        self.uid, self.reason, self.detail = uid, reason, detail


@dataclass(frozen=True)
class Limits:
    """What a trajectory must keep to; the same values as for the policy's own answers."""

    max_tokens: int
    """Longest response, end token included."""
    banned_ids: Collection[int] = ()
    """Token ids that no response may hold (vision placeholders)."""
    stop_ids: Collection[int] = ()
    """Token ids that end a response; the template's end token must be one of them."""
    need_logprobs: bool = False
    """Reject trajectories without stored log-probs."""
    require_tag: bool = True
    """Reject trajectories whose answer does not stand in an answer tag."""


class TrajectoryReader:
    """Turns samples' trajectories into tokens, once per sample.

    A trajectory is `Sample.offline_output`, with optional log-probs in the record's field `offline_logprobs` (one per
    token, end token included), or an entry of `more`, which comes first.

    Args:
        processor: the model's Hugging Face processor.
        templates: the prompt templates of the data stage.
        limits: see `Limits`.
        more: uid -> {"offline_output", "offline_logprobs"}; see `read_trajectory_files`.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        templates: PromptTemplates,
        limits: Limits,
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.templates = templates
        self.limits = limits
        self.more = dict(more or {})
        self.rejected: dict[str, tuple[Reason, str]] = {}
        """uid -> (reason, detail) of every trajectory that was refused."""
        self._placeholders = self.tokenizer.convert_ids_to_tokens(list(limits.banned_ids))
        self._known: dict[str, Trajectory | None] = {}

    def check_samples(self, uids: Iterable[str]) -> None:
        """Reject entries of `more` whose sample is not among `uids`."""
        unknown = sorted(set(self.more) - set(uids))
        self.rejected |= dict.fromkeys(unknown, ("unknown_sample", "no training sample has this id"))
        if unknown:
            log.warning(
                "%d of %d offline trajectories rejected (unknown_sample): no training sample has the id %s%s",
                len(unknown),
                len(self.more),
                ", ".join(unknown[:10]),
                " ..." if len(unknown) > 10 else "",
            )

    def get(self, prompt: PreparedSample) -> Trajectory | None:
        """The sample's trajectory; None when it has none or the one it has was rejected."""
        if prompt.uid not in self._known:
            try:
                self._known[prompt.uid] = self._read(prompt)
            except RejectedError as error:
                self.reject(error)
        return self._known[prompt.uid]

    def reject(self, error: RejectedError) -> None:
        """Never give out this trajectory (again); said once."""
        self._known[error.uid] = None
        if error.uid not in self.rejected:
            self.rejected[error.uid] = (error.reason, error.detail)
            log.warning("%s", error)

    def _read(self, prompt: PreparedSample) -> Trajectory | None:
        sample = prompt.sample
        own = {"offline_output": sample.offline_output, "offline_logprobs": sample.extra.get("offline_logprobs")}
        entry = self.more.get(prompt.uid, own)
        if entry.get("offline_output") is None:
            return None
        return self.tokenise(prompt, entry["offline_output"], entry.get("offline_logprobs"))

    def tokenise(self, prompt: PreparedSample, text: Any, logprobs: Any = None) -> Trajectory:
        """The tokens that the policy would have to sample to give this answer.

        Raises:
            RejectedError: with the reason.
        """
        uid = prompt.uid
        text, turn = self._assistant_turn(prompt, self._checked_text(uid, text))
        ids = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        if self.limits.stop_ids and ids[-1] not in self.limits.stop_ids:
            raise RejectedError(uid, "wrong_template", f"its last token {ids[-1]} does not end a response")
        if len(ids) > self.limits.max_tokens:
            detail = f"{len(ids)} tokens with the end token, the response limit is {self.limits.max_tokens}"
            raise RejectedError(uid, "too_long", detail)
        banned = sorted(set(ids) & set(self.limits.banned_ids))
        if banned:
            raise RejectedError(uid, "placeholder", f"it holds the placeholder tokens {banned}")
        values = self._logprobs(uid, logprobs, len(ids))
        return Trajectory(uid, text, np.asarray(ids, dtype=np.int32), values)

    def _checked_text(self, uid: str, text: Any) -> str:
        """The text without space and end token around it."""
        if not isinstance(text, str):
            raise RejectedError(uid, "not_text", f"it is {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RejectedError(uid, "not_text", "it holds half of a surrogate pair, which is no character") from error
        text = text.strip().removesuffix(self.tokenizer.eos_token).strip()
        if not text:
            raise RejectedError(uid, "empty", "it has no text")
        for token in self._placeholders:
            if token in text:
                raise RejectedError(uid, "placeholder", f"it holds the placeholder token {token}")
        markup = _CHAT_MARKUP.search(text)
        special = next((t for t in self.tokenizer.all_special_tokens if t in text), None)
        if found := special or (markup.group() if markup else ""):
            raise RejectedError(uid, "wrong_template", f"it holds {found!r}: give the text without chat markup")
        answer = read_answer(text)
        if answer.think == "open":
            raise RejectedError(uid, "no_answer", "its thinking never ends")
        if not answer.text or (self.limits.require_tag and not answer.tagged):
            raise RejectedError(uid, "no_answer", "it holds no <answer>...</answer> with content")
        return text

    def _assistant_turn(self, prompt: PreparedSample, text: str) -> tuple[str, str]:
        """What the policy says behind the generation prompt, without and with the end token."""
        end = self.tokenizer.eos_token
        messages = [*self.templates.messages(prompt.sample), {"role": "assistant", "content": text}]
        rendered = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        if not rendered.startswith(prompt.prompt_text):
            detail = "the chat template renders the conversation differently with it than without it"
            raise RejectedError(prompt.uid, "wrong_template", detail)
        turn = rendered[len(prompt.prompt_text) :]
        # Some templates write none behind an answer, only space in front of the next turn.
        head = turn.rpartition(end)[0] if end in turn else turn.rstrip()
        # A template may set its own space around thinking, and the prompt may open it. Anything else that a template
        # rewrites could never have been said.
        said, meant, asked = ("".join(part.split()) for part in (head, text, prompt.prompt_text))
        if not meant.endswith(said) or not asked.endswith(meant.removesuffix(said)):
            raise RejectedError(prompt.uid, "wrong_template", f"the chat template turns it into {turn[:80]!r}")
        return head.strip(), head + end

    def _logprobs(self, uid: str, values: Any, length: int) -> np.ndarray:
        if values is None:
            if self.limits.need_logprobs:
                detail = "this weighting needs offline_logprobs, which the record lacks"
                raise RejectedError(uid, "logprobs", detail)
            return np.full(length, np.nan, dtype=np.float32)
        try:
            with np.errstate(over="ignore"):
                result = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            result = np.full(length, np.nan, dtype=np.float32)
        if result.ndim == 1 and len(result) != length:
            detail = f"{len(result)} offline_logprobs for {length} tokens (end token included)"
            raise RejectedError(uid, "logprobs", detail)
        if result.ndim != 1 or not (np.isfinite(result) & (result <= 0)).all():
            raise RejectedError(uid, "logprobs", "offline_logprobs must be finite numbers of at most 0")
        return result


def read_trajectory_files(files: Sequence[str | Path] | str) -> dict[str, dict[str, Any]]:
    """Read records {"uid", "offline_output", optional "offline_logprobs"}; `uid` is `<data_source>:<problem_id>`.

    The formats are those of annotation files (`read_records`), usually JSON lines.

    Raises:
        ValueError: a file cannot be read, a record is no such object, or an id comes twice.
    """
    result: dict[str, dict[str, Any]] = {}
    for file in [files] if isinstance(files, (str, Path)) else files:
        for number, entry in _records(file):
            if not isinstance(entry, Mapping) or not {"uid", "offline_output"} <= entry.keys():
                raise ValueError(f"{file}:{number}: no trajectory with uid and offline_output ({str(entry)[:80]!r})")
            uid, text = str(entry["uid"]), entry["offline_output"]
            if uid in result:
                raise ValueError(f"{file}:{number}: a second trajectory for sample {uid}")
            logprobs = entry.get("offline_logprobs")
            result[uid] = {"offline_output": "" if text is None else text, "offline_logprobs": logprobs}
    return result


def _records(file: str | Path) -> list[tuple[int, Any]]:
    try:
        return list(read_records(Path(file)))
    except ValueError as error:
        raise ValueError(f"trajectory_files: {error}") from error
