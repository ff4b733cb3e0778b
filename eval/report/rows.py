"""The lines of a report: one per benchmark, with what is needed to judge the number beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One benchmark of a report."""

    name: str
    title: str
    metric: str
    value: float | None
    """The headline, official extraction; None = not judged."""
    robust: float | None
    """The same metric with the robust extraction, where it differs; else None."""
    counts: str
    """Items in words: expected, ok, failed, unparsed, not judged, and whether the run is partial."""
    published: str
    """The official figure when settings match, else "not comparable" and why."""
    baseline: float | None = None
    delta: float | None = None
    baseline_note: str = ""
    """What differs from the baseline's settings; empty when nothing does."""


def headline(result: Result) -> tuple[str, float | None]:
    """Name and value of the first headline metric."""
    return next(iter(result["headline"].items()), ("", None))


def rows(results: Sequence[Result], baseline: Sequence[Result] = ()) -> list[Row]:
    """One row per result; the baseline's result of the same benchmark and split stands beside it."""
    return [_row(result, counterpart(result, baseline)) for result in results]


def counterpart(result: Result, baseline: Sequence[Result]) -> Result | None:
    """The baseline's result of the same benchmark and split, or None."""
    names = (result["benchmark"], result["split"])
    return next((other for other in baseline if (other["benchmark"], other["split"]) == names), None)


def _row(result: Result, other: Result | None) -> Row:
    metric, value = headline(result)
    robust = result["robust_headline"].get(metric)
    before = None if other is None else other["headline"].get(metric)
    return Row(
        name=result["benchmark"],
        title=result["title"],
        metric=metric,
        value=value,
        robust=robust if robust != value else None,
        counts=count_text(result),
        published=published_text(result),
        baseline=before,
        delta=None if before is None or value is None else value - before,
        baseline_note="" if other is None else difference(result, other),
    )


def count_text(result: Result) -> str:
    """`n_expected=8 n_ok=6 n_failed=1 n_unparsed=1`, and what else a reader must know."""
    counts = result["counts"]
    parts = [f"{name}={counts.get(name, 0)}" for name in ("n_expected", "n_ok", "n_failed", "n_unparsed")]
    if counts.get("n_not_judged"):
        parts.append(f"n_not_judged={counts['n_not_judged']}")
    if result.get("unasked"):
        parts.append(f"n_not_asked={result['unasked']}")
    return " ".join(parts) + (" PARTIAL" if result["is_partial"] else "")


def published_text(result: Result) -> str:
    """The official figure, only when it may stand beside this one."""
    published = result.get("published")
    if result["comparable"] and published:
        metric = "" if published["metric"] == headline(result)[0] else f"{published['metric']} "
        return f"{metric}{published['value']:.1f} ({published['source']})"
    return f"not comparable: {result['reason']}"


def difference(result: Result, other: Result) -> str:
    """Settings, apart from the model, in which two runs differ."""
    mine, theirs = result["settings"], other["settings"]
    names = [key for key in mine if key != "model" and mine[key] != theirs.get(key)]
    if result["counts"]["n_items"] != other["counts"]["n_items"]:
        names.append("number of items")
    return ", ".join(names)


def group_rows(result: Result, other: Result | None) -> list[dict[str, Any]]:
    """Subgroup bars: one entry per table, each with its groups' value, count, baseline and delta."""
    before = {} if other is None else other["tables"]
    tables = []
    for name, cells in result["tables"].items():
        groups = []
        for group, cell in cells.items():
            old = before.get(name, {}).get(group, {}).get("value")
            delta = None if old is None or cell["value"] is None else cell["value"] - old
            groups.append({"name": group, "value": cell["value"], "n": cell["n"], "baseline": old, "delta": delta})
        if groups:
            tables.append({"name": name, "groups": groups})
    return tables
