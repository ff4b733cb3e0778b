"""Ordering: events put into sequence, scored by the share of pairs in the right order (Kendall's tau, from 0 to 1)."""

from __future__ import annotations

import re
from itertools import combinations

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.sections import plain


def read_order(text: str) -> tuple[str, ...]:
    """Letters or numbers of a sequence: "B, A, C", "B -> A -> C", "[2, 1, 3]"."""
    return tuple(item.upper() for item in re.findall(r"(?<!\w)(?:[A-Za-z]|\d{1,2})(?!\w)", plain(text)))


class Ordering(TaskReward):
    """Share of pairs in the right order; an answer must name every event exactly once."""

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError for a gold with fewer than two events."""
        gold, order = read_order(str(query.ground_truth)), read_order(answer)
        if len(gold) < 2 or len(set(gold)) != len(gold):
            raise ValueError(f"the gold order {query.ground_truth!r} does not name two or more different events")
        if sorted(order) != sorted(gold):
            return unparsable(f"names {', '.join(order) or 'nothing'} instead of {', '.join(sorted(gold))} once each")
        place = {event: index for index, event in enumerate(order)}
        pairs = list(combinations(gold, 2))
        return Verdict(sum(place[first] < place[second] for first, second in pairs) / len(pairs))

    def well_formed(self, query: Query, answer: str) -> bool:
        """Every event once and nothing else but separators."""
        return sorted(read_order(answer)) == sorted(read_order(str(query.ground_truth)))
