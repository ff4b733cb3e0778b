"""Means of verdicts as the benchmarks define them: pure functions on values in [0, 1], results in percent.

A value of None is an answer that nobody has judged: it is in no denominator. A failed item is 0.0, not None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.benchmarks.types import Cell

Value = float | None


def mean(values: Iterable[Value]) -> Cell:
    """Mean of the judged values in percent, with their number."""
    judged = [value for value in values if value is not None]
    return Cell(100.0 * sum(judged) / len(judged) if judged else None, len(judged))


def table(pairs: Iterable[tuple[Any, Value]]) -> dict[str, Cell]:
    """Mean per group. A group that is a list puts its item into each of its entries; None and "" into no group."""
    groups: dict[str, list[Value]] = defaultdict(list)
    for group, value in pairs:
        for name in group if isinstance(group, (list, tuple)) else [group]:
            if name is not None and name != "":
                groups[str(name)].append(value)
    return {name: mean(values) for name, values in sorted(groups.items())}


def macro(cells: Mapping[str, Cell], groups: Sequence[str] = ()) -> Value:
    """Unweighted mean of the groups' values.

    Args:
        cells: value per group.
        groups: the official groups; one without items counts 0 and the divisor stays. Empty = those of `cells`.
    """
    names = list(groups or cells)
    if not names or not any(cell.value is not None for cell in cells.values()):
        return None
    present = {name: cells[name] for name in names if name in cells and cells[name].n}
    return sum(cell.value or 0.0 for cell in present.values()) / len(names)


def mean_of(values: Iterable[Value]) -> Value:
    """Plain mean of percentages; None when one of them is None or there are none."""
    numbers = list(values)
    if not numbers or any(number is None for number in numbers):
        return None
    return sum(number for number in numbers if number is not None) / len(numbers)


def recall_at(ious: Iterable[Value], threshold: float) -> Value:
    """Share of items whose IoU reaches the threshold (inclusive), in percent."""
    return mean(None if iou is None else float(iou >= threshold) for iou in ious).value


def all_correct(pairs: Iterable[tuple[Any, Value]]) -> Cell:
    """Share of questions of which every part is right (VideoMathQA's MBin); a question with an unjudged part is out."""
    groups: dict[Any, list[Value]] = defaultdict(list)
    for question, value in pairs:
        groups[question].append(value)
    return mean(None if None in values else float(all(v == 1.0 for v in values)) for values in groups.values())


_RELEVANCE = (0.0, 6.25, 25.0, 56.25, 100.0)
_LOGIC = {
    "[1,2,3,4]": _RELEVANCE,
    "[1,[2,3],4]": (0.0, 100 / 12, 400 / 12, 700 / 12, 100.0),
    "[[1,2],3,4]": (0.0, 10.0, 20.0, 50.0, 100.0),
}


def group_relevance(scores: Sequence[float]) -> float:
    """Video-MME-v2 score of four questions on one ability: grows faster than their number. Percent."""
    return _RELEVANCE[sum(score == 1 for score in scores)]


def group_logic(scores: Sequence[float], structure: Any) -> float:
    """Video-MME-v2 score of a chain of four questions, by how far it is right from the first on. Percent.

    Where the chain breaks at the first of two parallel questions but the second is right, that is one step more.

    Raises:
        ValueError: the structure is none of the three.
    """
    key = str(structure).replace(" ", "").replace('"', "")
    if key not in _LOGIC:
        raise ValueError(f"group_structure {structure!r}: known are {', '.join(_LOGIC)}")
    right = [score == 1 for score in scores]
    length = right.index(False) if False in right else len(right)
    parallel = {"[1,[2,3],4]": 1, "[[1,2],3,4]": 0}.get(key)
    if parallel is not None and length == parallel and right[parallel + 1]:
        length += 1
    return _LOGIC[key][length]


def vsi_tasks(by_type: Mapping[str, Value]) -> dict[str, Value]:
    """The eight tasks of VSI-Bench from its question types: three levels of relative direction are averaged first."""
    levels = [value for name, value in by_type.items() if name.startswith("object_rel_direction_")]
    rest = {name: value for name, value in by_type.items() if not name.startswith("object_rel_direction_")}
    return {**rest, **({"object_rel_direction": mean_of(levels)} if levels else {})}


def category_means(cells: Mapping[str, Cell], categories: Mapping[str, Sequence[str]]) -> dict[str, Value]:
    """OVO-Bench: mean over the tasks of each category, then `total`, the mean over the categories. Absent ones are out.

    Args:
        cells: value per task.
        categories: category -> its tasks.
    """
    means = {name: mean_of(cells[t].value for t in tasks if t in cells) for name, tasks in categories.items()}
    present = {name: value for name, value in means.items() if value is not None}
    return {**present, "total": mean_of(present.values())}


def delta_knowledge(before: float, after: float) -> float:
    """Video-MMMU's knowledge gain: (after - before) / (100 - before), in percent; negative values are meant.

    Args:
        before: accuracy in percent without the video.
        after: accuracy in percent with it.

    Raises:
        ValueError: nothing is left to gain.
    """
    if before >= 100:
        raise ValueError(f"accuracy before the video is {before}: no knowledge is left to gain")
    return 100.0 * (after - before) / (100.0 - before)
