"""Boolean: yes/no, true/false; also the yes-no queries of streaming benchmarks."""

from __future__ import annotations

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.boolean import find_boolean


class Boolean(TaskReward):
    """1 when the answer's polarity equals the gold's, else 0."""

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy 1.0 or 0.0. Raises ValueError when the gold answer is neither yes nor no."""
        gold, _ = find_boolean(str(query.ground_truth))
        if gold is None:
            raise ValueError(f"the gold answer {query.ground_truth!r} is neither yes/no nor true/false")
        value, reason = find_boolean(answer)
        return unparsable(reason) if value is None else Verdict(float(value == gold))

    def well_formed(self, query: Query, answer: str) -> bool:
        """One or two words with a polarity."""
        return len(answer) <= 16 and find_boolean(answer)[0] is not None
