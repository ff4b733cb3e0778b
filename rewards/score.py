"""Scores records from the shell: `python -m rewards.score FILE.jsonl [--mode official] [--out SCORES.jsonl]`.

A record holds `response`, `ground_truth` (or `answer`, `solution`), `problem_type`, and what its type needs (`options`,
`tests`, `width`, ...). Scores go out as JSON lines in the order of the records, a table per type beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from rich.console import Console
from rich.table import Table

from datamodules.common.places import CONF_DIR, add_config_dirs, config_dirs, option_files
from datamodules.records import read_records
from rewards.base import Score
from rewards.router import RewardRouter

_RESPONSE = ("response", "output", "prediction")
_GOLD = ("ground_truth", "answer", "solution")
_STATUS = ("ok", "unparsable", "timeout", "error", "not_judged")


def score_arguments(file: Path) -> Iterator[dict[str, Any]]:
    """Keyword arguments of `RewardRouter.score` per record. Raises ValueError with the line that cannot be scored."""
    for number, record in read_records(file):
        place = f"{file}:{number}"
        if not isinstance(record, dict):
            raise ValueError(f"{place} is not a JSON object: {str(record)[:80]!r}")
        fields = dict(record)
        response, gold = _take(fields, _RESPONSE, place), _take(fields, _GOLD, place)
        if "problem_type" not in fields:
            raise ValueError(f"{place} has no `problem_type`")
        for own in ("mode", "self"):  # names of the scorer's own arguments
            fields.pop(own, None)
        yield {**fields, "response": "" if response is None else str(response), "ground_truth": gold}


def _take(fields: dict[str, Any], names: Sequence[str], place: str) -> Any:
    for name in names:
        if name in fields:
            return fields.pop(name)
    raise ValueError(f"{place} has none of the fields {', '.join(names)}")


def router_from(config: str | None, overrides: Sequence[str]) -> RewardRouter:
    """The router of `conf/reward/<config>.yaml` with Hydra overrides such as `format_weight=0`.

    Raises:
        ValueError: no such configuration.
    """
    names = option_files("reward")
    if config and config not in names:
        raise ValueError(f"--config {config} does not exist; there are {', '.join(sorted(names))}")
    paths = ",".join(f"'file://{folder / 'reward'}'" for folder in (CONF_DIR, *config_dirs()))
    # Hydra looks for the first file in one folder only, for what that file builds on in all of them.
    with initialize_config_dir(str(names[config or "default"].parent), version_base=None):
        loaded = compose(config or "default", overrides=[*overrides, f"hydra.searchpath=[{paths}]"])
    return instantiate(loaded, _convert_="all")


def score_records(router: RewardRouter, records: Sequence[Mapping[str, Any]], mode: str) -> list[Score]:
    """Scores in the order of the records; slow types run in parallel."""
    pending = [router.submit(**record, mode=mode) for record in records]  # type: ignore[arg-type]
    return [future.result() for future in pending]


def as_json(record: Mapping[str, Any], score: Score) -> str:
    """One line of output: what identifies the record, then its score."""
    keys = ("id", "uid", "problem_id", "problem_type", "benchmark")
    head = {key: record[key] for key in keys if key in record}
    body = {"accuracy": score.accuracy, "format": score.format, "total": score.total, "status": score.status}
    line = json.dumps({**head, **body, "reason": score.reason, "parts": dict(score.parts)}, ensure_ascii=False)
    return line.encode("utf-8", "backslashreplace").decode("utf-8")  # a lone surrogate becomes its JSON escape


def write_table(stream: TextIO, names: Sequence[str], scores: Sequence[Score]) -> None:
    """Means over judged answers and counts of every status, one row per type."""
    groups: dict[str, list[Score]] = defaultdict(list)
    for name, score in zip(names, scores, strict=True):
        groups[name].append(score)
    table = Table()
    for title in ("type", "answers", "accuracy", "format", "total", *_STATUS):
        table.add_column(title, justify="left" if title == "type" else "right")
    for name, rows in [*sorted(groups.items()), ("all", list(scores))]:
        judged = [score for score in rows if score.has_verdict]
        means = [
            f"{sum(getattr(score, part) for score in judged) / len(judged):.4f}" if judged else "-"
            for part in ("accuracy", "format", "total")
        ]
        counts = [str(sum(score.status == status for score in rows)) for status in _STATUS]
        table.add_row(name, str(len(rows)), *means, *counts)
    Console(file=stream, width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rewards.score", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines, or another format of annotation files")
    parser.add_argument("--mode", choices=("robust", "official"), default="robust", help="how answers are read")
    parser.add_argument("--config", help="name of a file in conf/reward (default: default)")
    parser.add_argument("--config-dir", help="your own folder of options, whose reward/ is looked in too")
    parser.add_argument(
        "--out", type=Path, help="write scores there; otherwise to standard output, the table to stderr"
    )
    parser.add_argument("override", nargs="*", help="settings of the router, e.g. format_weight=0")
    args = parser.parse_intermixed_args(arguments)
    try:
        add_config_dirs([args.config_dir] if args.config_dir else [])
        records = list(score_arguments(args.file))
        with router_from(args.config, args.override) as router:
            names = [router.type_name(record["problem_type"]) for record in records]
            scores = score_records(router, records, args.mode)
    except (OSError, ValueError, HydraException) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    lines = "".join(as_json(record, score) + "\n" for record, score in zip(records, scores, strict=True))
    if args.out is None:
        sys.stdout.write(lines)
    else:
        args.out.write_text(lines, encoding="utf-8")
    write_table(sys.stderr if args.out is None else sys.stdout, names, scores)
    return 0


if __name__ == "__main__":
    sys.exit(main())
