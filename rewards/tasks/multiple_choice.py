"""Multiple choice: 1 when the chosen option is the gold one, else 0."""

from __future__ import annotations

from rewards.base import Query, TaskReward, Verdict, unparsable
from rewards.extract.choice import OptionSet, find_choice, gold_label, parse_options


class MultipleChoice(TaskReward):
    """Exact match of option labels; the valid labels come from the options of the record."""

    def _options(self, query: Query) -> OptionSet:
        return parse_options(query.options, str(query.ground_truth))

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy 1.0 or 0.0. Raises ValueError when the gold answer is not an option."""
        options = self._options(query)
        gold = gold_label(str(query.ground_truth), options)
        label, reason = find_choice(answer, options)
        if label is None:
            return unparsable(reason)
        return Verdict(float(label == gold))

    def well_formed(self, query: Query, answer: str) -> bool:
        """A short answer that names one option."""
        options = self._options(query)
        longest = max((len(text) for text in options.texts), default=0)
        return len(answer) <= longest + 16 and find_choice(answer, options)[0] is not None
