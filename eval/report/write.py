"""Write a report in every form: JSON, Markdown, one self-contained HTML page, TensorBoard scalars."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datamodules.common.files import naming, write_json, write_text
from eval.report.items import browser_items
from eval.report.rows import Result, Row, counterpart, group_rows, headline, rows

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page.html")
PLACE = "__REPORT_DATA__"


def write_reports(
    results: Sequence[Result],
    folder: str | Path,
    baseline: str | Path | None = None,
    num_items: int = 200,
    tensorboard_step: int | None = None,
) -> str:
    """Write `report.json`, `report.md` and `report.html` into `folder`; returns the table in plain text.

    Args:
        results: what `BenchmarkRun.aggregate` returned.
        folder: the model's folder.
        baseline: folder (or report.json) of another evaluation to compare with.
        num_items: items per benchmark in the page's browser; 0 = none.
        tensorboard_step: step of the scalars; None = no TensorBoard.

    Raises:
        OSError: a file cannot be written; the message names it.
        ValueError: the baseline holds no report.
    """
    folder = Path(folder)
    before = read_report(baseline) if baseline else []
    table = rows(results, before)
    write_json(folder / "report.json", {"results": list(results), "rows": [asdict(row) for row in table]})
    write_text(folder / "report.md", markdown(results, table, before))
    write_text(folder / "report.html", page(results, table, before, num_items))
    if tensorboard_step is not None:
        with naming(folder / "tensorboard"):
            write_scalars(results, folder / "tensorboard", tensorboard_step)
    return text_table(table)


def console_table(results: Sequence[Result], baseline: str | Path | None = None) -> str:
    """The table in plain text, without any file."""
    return text_table(rows(results, read_report(baseline) if baseline else []))


def read_report(path: str | Path) -> list[dict[str, Any]]:
    """Results of an earlier report.

    Raises:
        ValueError: there is none.
    """
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"baseline={path} does not exist: give the folder of an evaluation, it holds report.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))["results"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"baseline={path} is not a report ({type(error).__name__}: {error})") from error


def number(value: float | None, sign: bool = False) -> str:
    """One decimal; "not judged" without a value."""
    if value is None:
        return "not judged"
    return f"{value:+.1f}" if sign else f"{value:.1f}"


def text_table(table: Sequence[Row]) -> str:
    """The console's table: a line per benchmark and, below it, what else must be said."""
    width = max(len(row.name) for row in table)
    metric = max(len(row.metric) for row in table)
    lines = []
    for row in table:
        robust = "" if row.robust is None else f"  (robust extraction {number(row.robust)})"
        delta = "" if row.delta is None else f"  {number(row.delta, sign=True)} against the baseline"
        lines.append(
            f"{row.name:<{width}}  {row.metric:<{metric}}  {number(row.value):>6}  {row.counts}{robust}{delta}"
        )
        lines.append(f"{'':<{width}}  published: {row.published}")
    return "\n".join(lines)


def markdown(results: Sequence[Result], table: Sequence[Row], before: Sequence[Result]) -> str:
    """The report in Markdown: one table of headlines, one per subgroup."""
    model = results[0]["model"]
    lines = [f"# Evaluation of {model}", ""]
    lines += [
        "| benchmark | metric | score | robust | baseline | delta | items | published |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    for row in table:
        old = "" if row.baseline is None else number(row.baseline) + ("*" if row.baseline_note else "")
        delta = "" if row.delta is None else number(row.delta, sign=True)
        robust = number(row.value if row.robust is None else row.robust)
        cells = [row.title, row.metric, number(row.value), robust, old, delta, row.counts, row.published]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    for row in table:
        if row.baseline_note:
            lines += ["", f"\\* {row.title}: the baseline has other settings ({row.baseline_note})."]
    for result in results:
        lines += ["", f"## {result['title']}", ""]
        lines += [f"- {name}: {number(value)}" for name, value in result["headline"].items()]
        lines += [f"- {note}" for note in result["notes"]]
        for group in group_rows(result, counterpart(result, before)):
            lines += ["", f"| {_cell(group['name'])} | score | n | delta |", "|---|--:|--:|--:|"]
            for cell in group["groups"]:
                delta = "" if cell["delta"] is None else number(cell["delta"], sign=True)
                lines.append(f"| {_cell(cell['name'])} | {number(cell['value'])} | {cell['n']} | {delta} |")
    return "\n".join(lines) + "\n"


def page(results: Sequence[Result], table: Sequence[Row], before: Sequence[Result], num_items: int) -> str:
    """One HTML page without any outside reference."""
    benchmarks = []
    for result, row in zip(results, table, strict=True):
        benchmarks.append(
            {
                **asdict(row),
                "tables": group_rows(result, counterpart(result, before)),
                "headline": result["headline"],
                "robust_headline": result["robust_headline"],
                "notes": list(result["notes"]),
                "settings": result["settings"],
                "stats": result.get("stats", {}),
                "items": browser_items(result["folder"], num_items),
                "num_items": result["counts"]["n_items"],
            }
        )
    data = {
        "model": results[0]["model"],
        "baseline": before[0]["model"] if before else "",
        "written": results[0].get("written", ""),
        "benchmarks": benchmarks,
    }
    # Inside a script element only "<" can end it; answers of models are untrusted text.
    text = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace(PLACE, text)


def write_scalars(results: Sequence[Result], folder: Path, step: int) -> None:
    """TensorBoard scalars `eval/<benchmark>/<metric>`, both extractions, and the counts."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for result in results:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(result).items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    writer.close()


def scalars(result: Result) -> dict[str, float]:
    """Flat scalars of one result; what was not judged is left out."""
    name = result["benchmark"]
    found = {f"eval/{name}/{metric}": value for metric, value in result["headline"].items()}
    found |= {f"eval_robust/{name}/{metric}": value for metric, value in result["robust_headline"].items()}
    found |= {f"eval_counts/{name}/{count}": value for count, value in result["counts"].items()}
    metric, _ = headline(result)
    for table, cells in result["tables"].items():
        found |= {f"eval_groups/{name}/{table}/{group}/{metric}": cell["value"] for group, cell in cells.items()}
    return {tag.replace(" ", "_"): float(value) for tag, value in found.items() if value is not None}


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
