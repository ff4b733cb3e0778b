"""From figures to a summary: counts, and whether a published figure may stand beside the headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from eval.benchmarks.base import Benchmark, Judged
from eval.benchmarks.types import Published, RunInfo, ScoredItem, Summary
from rewards.base import Score


def summarise(benchmark: Benchmark, scored: Sequence[ScoredItem], run: RunInfo | None = None) -> Summary:
    """All figures of a run. Failed items count 0, items that were not judged are in no denominator.

    Args:
        benchmark: computes them.
        scored: one entry per item.
        run: settings of the run; without them nothing is comparable with published figures.
    """
    run = run or RunInfo()
    headline, tables = benchmark.figures([_judged(entry, entry.official) for entry in scored])
    robust_headline, robust_tables = benchmark.figures([_judged(entry, entry.robust) for entry in scored])
    report = run.report
    split = report.split if report else benchmark.split
    expected = report.expected_n if report and report.expected_n is not None else benchmark.expected.get(split)
    states = Counter(entry.state for entry in scored)
    counts = {"n_expected": len(scored) if expected is None else expected, "n_items": len(scored)}
    counts |= {f"n_{state}": states[state] for state in ("ok", "failed", "unparsed", "not_judged")}
    is_partial = bool(report and report.is_partial) or len(scored) < counts["n_expected"]
    name = run.model.rpartition("--")[2]  # models of the hub are called <owner>--<name>
    published = next((entry for entry in benchmark.published if entry.model == name), None)
    reason = _reason(benchmark, run, split, headline, published, is_partial, counts)
    return Summary(
        benchmark=benchmark.name,
        split=split,
        headline=headline,
        tables=tables,
        robust_headline=robust_headline,
        robust_tables=robust_tables,
        counts=counts,
        comparable=not reason,
        reason=reason,
        published=published,
        is_partial=is_partial,
        notes=tuple(n for n in (benchmark.notes, *(report.notes if report else ())) if n),
    )


def _judged(entry: ScoredItem, score: Score | None) -> Judged:
    """An item as the figures of one reading of its response see it."""
    if entry.state == "failed":
        return Judged(entry.item, 0.0, None, entry.response)
    if score is None or score.status == "not_judged" or (entry.item.needs_judge and not score.has_verdict):
        return Judged(entry.item, None, score, entry.response)
    return Judged(entry.item, score.accuracy if score.status == "ok" else 0.0, score, entry.response)


def _reason(
    benchmark: Benchmark,
    run: RunInfo,
    split: str,
    headline: Mapping[str, float | None],
    published: Published | None,
    is_partial: bool,
    counts: Mapping[str, int],
) -> str:
    """Why the headline is not comparable; "" when it is."""
    if published is None:
        return f"no published figure of {run.model} is known" if run.model else "the model's name is not given"
    if published.certainty != "verified":
        return f"the published {published.value:g} could not be verified"
    if published.metric not in headline:
        return f"the published figure is {published.metric}, which this run does not report"
    if headline[published.metric] is None:
        return f"{published.metric} cannot be computed: its groups are not in these files, or nothing is judged"
    if is_partial:
        return "the run is partial"
    if counts["n_items"] != counts["n_expected"]:
        return f"the official split has {counts['n_expected']} questions, these files {counts['n_items']}"
    if counts["n_failed"]:
        return f"{counts['n_failed']} items failed"
    if counts["n_not_judged"]:
        return f"{counts['n_not_judged']} answers are not judged"
    if run.report is not None and run.report.expected_n is None:
        return "the official number of questions is not known"
    if (published.split or benchmark.split) != split:
        return f"the published figure is of split {published.split or benchmark.split}, this run of {split}"
    for name, theirs, ours in (
        ("prompt style", published.style, run.style),
        ("frame policy", published.frame_policy, run.frame_policy),
    ):
        if not theirs:
            return f"the {name} of the published figure is not known"
        if theirs != ours:
            return f"the published figure used {name} {theirs}, this run {ours or 'an unknown one'}"
    return ""
