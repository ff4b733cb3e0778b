"""The format part of a reward: the answer stands where the prompt asked for it and has the right kind of content."""

from __future__ import annotations

from typing import Literal

from rewards.base import Query, TaskReward
from rewards.extract.sections import Answer

Style = Literal["auto", "thinking", "direct"]
STYLES: tuple[Style, ...] = ("auto", "thinking", "direct")


def format_score(answer: Answer, query: Query, task: TaskReward, style: Style) -> float:
    """1.0 when every rule holds, else 0.0.

    All styles: exactly one closed answer tag, nothing behind it, content that `task.well_formed` accepts.
    `thinking`: finished, non-empty thinking before it, and nothing but white space between the two. `direct`: no
    thinking and nothing before the tag. `auto`: thinking is optional, text before the tag is allowed.
    """
    if not answer.tagged or answer.num_tags != 1 or answer.tail:
        return 0.0
    if style == "thinking" and (answer.think != "closed" or not answer.thought.strip() or answer.head):
        return 0.0
    if style == "direct" and (answer.think != "none" or answer.head):
        return 0.0
    if answer.think == "closed" and "<answer>" in answer.thought:
        return 0.0
    return float(task.well_formed(query, answer.text))
