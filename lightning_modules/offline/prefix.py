"""Prefix blending: the policy continues the beginning of an offline trajectory (Prefix-RFT, arXiv 2507.01679)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datamodules.common.seeds import uniform
from lightning_modules.offline.base import OfflineCallback
from lightning_modules.offline.schedule import Share, as_share, check_share

if TYPE_CHECKING:
    from datamodules.types import PreparedSample, StepBatch
    from lightning_modules.algorithms.weighting import OffPolicyWeighting
    from lightning_modules.offline.trajectories import Trajectory
    from rollout.types import GenerateRequest, Response, RolloutGroup, SamplingSpec


class PrefixCallback(OfflineCallback):
    """Gives the last `answers` of every group the beginning of the sample's trajectory to continue.

    The prefix is part of what the engine reads and of the response that is scored and trained on; `Response.source`
    marks its tokens. Prefix and continuation together keep to the response limit.

    Args:
        enable: the switch.
        share: length of the prefix as a share of the trajectory; a number or a schedule over RL steps. At least the
            end token is left to the policy.
        spread: prefixes are shortened by a random part of up to this share, so that a step holds several lengths.
        answers: how many of a group's answers continue a prefix.
        min_score: see `OfflineCallback`.
        weighting: loss of the prefix's tokens (`weight: 0` masks them); None = the algorithm's own.
        seed: of the random lengths.
        trajectory_files: see `OfflineCallback`.
        require_tag: see `OfflineCallback`.
    """

    def __init__(
        self,
        enable: bool = True,
        share: float | Share = 0.5,
        spread: float = 0.0,
        answers: int = 1,
        min_score: float | None = None,
        weighting: OffPolicyWeighting | None = None,
        seed: int = 0,
        trajectory_files: Sequence[str | Path] = (),
        require_tag: bool = True,
    ) -> None:
        super().__init__(enable, weighting, min_score, trajectory_files, require_tag)
        if answers < 1:
            raise ValueError(f"answers={answers}: at least one answer of a group continues a prefix")
        self.share = as_share(share)
        self.spread = check_share("spread", spread)
        self.answers = answers
        self.seed = seed
        self._prefixes: dict[tuple[int, int], tuple[Trajectory, int]] = {}

    def check(self, sampling: SamplingSpec) -> None:
        """No more prefixes than answers."""
        super().check(sampling)
        if self.answers > sampling.n:
            raise ValueError(f"answers={self.answers} of a group cannot continue a prefix: it has n={sampling.n}")

    def begin(self, batch: StepBatch, sampling: SamplingSpec) -> None:
        """Decide which answers continue how many tokens."""
        usable = self.good_trajectories(batch.prompts)
        self._prefixes = {}
        share = self.share(batch.rl_step)
        for index, prompt in enumerate(batch.prompts):
            if prompt.uid not in usable:
                continue
            trajectory = usable[prompt.uid]
            for k in range(sampling.n - self.answers, sampling.n):
                shorter = self.spread * uniform("offline", self.seed, batch.rl_step, f"{prompt.uid}|{k}")
                length = round(max(0.0, share - shorter) * len(trajectory.token_ids))
                length = self._cut(prompt, trajectory, min(length, len(trajectory.token_ids) - 1))
                if length:
                    self._prefixes[index, k] = (trajectory, length)
        lengths = [length for _, length in self._prefixes.values()]
        batch.metrics |= {"offline/prefix_share": share, "offline/prefixes_count": float(len(lengths))}
        if lengths:
            batch.metrics["offline/prefix_length"] = sum(lengths) / len(lengths)

    def _cut(self, prompt: PreparedSample, trajectory: Trajectory, length: int) -> int:
        """The longest cut of at most `length` tokens whose text is tokenised to the same tokens again."""
        tokenizer = self.reader.tokenizer
        while length > 0:
            ids = trajectory.token_ids[:length].tolist()
            text = prompt.prompt_text + tokenizer.decode(ids, skip_special_tokens=False)
            if tuple(tokenizer(text)["input_ids"]) == (*prompt.prompt_ids, *ids):
                return length
            length -= 1
        return 0

    def edit_requests(self, requests: list[GenerateRequest]) -> list[GenerateRequest]:
        """Let the engine read the prefixes behind the prompts."""
        prompts: dict[tuple[int, int], PreparedSample] = {}  # equal prefixes share one object: rendered once
        result = []
        for given in requests:
            request = given
            _, index, k = request.request_id.split(":")
            entry = self._prefixes.get((int(index), int(k))) if k.isdigit() else None
            if entry is not None:
                trajectory, length = entry
                key = (int(index), length)
                if key not in prompts:
                    prompts[key] = self._extended(request.prompt, trajectory.token_ids[:length].tolist())
                room = dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - length)
                request = dataclasses.replace(request, prompt=prompts[key], sampling=room)
            result.append(request)
        return result

    def _extended(self, prompt: PreparedSample, prefix: list[int]) -> PreparedSample:
        text = self.reader.tokenizer.decode(prefix, skip_special_tokens=False)
        return dataclasses.replace(
            prompt,
            prompt_text=prompt.prompt_text + text,
            prompt_ids=(*prompt.prompt_ids, *prefix),
            expanded_ids=(*prompt.expanded_ids, *prefix),
        )

    def edit_group(self, group: RolloutGroup) -> RolloutGroup:
        """Put the prefixes in front of their continuations."""
        responses = tuple(
            self._joined(response, *self._prefixes[group.index, k]) if (group.index, k) in self._prefixes else response
            for k, response in enumerate(group.responses)
        )
        return dataclasses.replace(group, responses=responses)

    def _joined(self, response: Response, trajectory: Trajectory, length: int) -> Response:
        ids = np.concatenate([trajectory.token_ids[:length], response.token_ids]).astype(np.int32)
        return dataclasses.replace(
            response,
            token_ids=ids,
            logprobs=np.concatenate([trajectory.logprobs[:length], response.logprobs]).astype(np.float32),
            text=self.reader.tokenizer.decode(ids.tolist(), skip_special_tokens=True),
            prompt_token_ids=response.prompt_token_ids[: len(response.prompt_token_ids) - length],
            source=np.arange(len(ids)) < length,
        )
