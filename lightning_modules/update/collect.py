"""From a step's groups and scores to what the algorithm reads: a reward table and the list of trained responses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lightning_modules.algorithms.base import RewardTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamodules.types import StepBatch
    from rewards.base import Score
    from rollout.types import RolloutGroup

Key = tuple[int, int]
"""(index of the group in the step, index of the response in the group)."""

Scored = tuple["RolloutGroup", "Sequence[Score]", "Score | None"]
"""A group, its responses' scores, its greedy response's score."""


@dataclass(frozen=True)
class Collected:
    """This rank's usable responses."""

    groups: list[RolloutGroup]
    """All groups of the step, usable or not; keys index into this list."""
    keys: list[Key]
    """Responses with a verdict, in (group, response) order; row i of `rewards` is `keys[i]`."""
    rewards: RewardTable
    masked: Counter = field(default_factory=Counter)
    """Groups left out, by reason."""

    @property
    def uids(self) -> list[str]:
        """Sample id of each group in `rewards`."""
        return [self.groups[index].uid for index in dict.fromkeys(group for group, _ in self.keys)]

    def selection(self, keys: Sequence[Key]) -> list[tuple[int, list[int]]]:
        """`keys` as the layouts want them: responses listed per group."""
        result: dict[int, list[int]] = {}
        for group, response in keys:
            result.setdefault(group, []).append(response)
        return sorted(result.items())


def collect(batch: StepBatch) -> Collected:
    """Read groups and scores of `batch`; a group with a response that has no verdict is masked as a whole.

    `batch.scores[i]` holds one score per response of `batch.groups[i]`; `batch.greedy_scores[i]`, where the batch has
    them, is the greedy response's.

    Raises:
        ValueError: groups and scores do not fit together.
    """
    if len(batch.groups) != len(batch.scores):
        raise ValueError(
            f"{len(batch.groups)} groups but scores of {len(batch.scores)}: was the reward callback added?"
        )
    keys: list[Key] = []
    chosen: list[Scored] = []
    masked: Counter = Counter()
    greedy_scores = batch.greedy_scores or [None] * len(batch.groups)
    for index, (group, scores, greedy) in enumerate(zip(batch.groups, batch.scores, greedy_scores, strict=True)):
        if len(scores) != len(group.responses):
            raise ValueError(f"sample {group.uid}: {len(group.responses)} responses but {len(scores)} scores")
        everything = (*scores, greedy) if greedy is not None else scores
        failed = [score.status for score in everything if not score.has_verdict]
        if failed:
            masked[failed[0]] += 1
            continue
        keys.extend((index, response) for response in range(len(group.responses)))
        chosen.append((group, scores, greedy))
    return Collected(list(batch.groups), keys, _table(chosen), masked)


def _table(chosen: Sequence[Scored]) -> RewardTable:
    scores = [score for _, group_scores, _ in chosen for score in group_scores]
    names = sorted({"accuracy", "format"} | {name for score in scores for name in score.parts})
    own = [{**score.parts, "accuracy": score.accuracy, "format": score.format} for score in scores]
    # NaN where a response's task has no such part.
    parts = {name: torch.tensor([p.get(name, math.nan) for p in own], dtype=torch.float64) for name in names}
    greedy = [score.total for _, _, score in chosen if score is not None]
    lengths = [len(response.token_ids) for group, _, _ in chosen for response in group.responses]
    owners = [i for i, (group, _, _) in enumerate(chosen) for _ in group.responses]
    return RewardTable(
        total=torch.tensor([score.total for score in scores], dtype=torch.float64),
        group=torch.tensor(owners, dtype=torch.int64),
        parts=parts,
        correct=parts["accuracy"],
        lengths=torch.tensor(lengths, dtype=torch.int64),
        greedy_total=torch.tensor(greedy, dtype=torch.float64) if greedy and len(greedy) == len(chosen) else None,
        tasks=tuple(group.prompt.sample.problem_type for group, _, _ in chosen),
    )
