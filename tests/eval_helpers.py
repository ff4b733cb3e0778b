"""Small builders for the tests of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datamodules.types import MediaRef, Sample
from eval.benchmarks.types import BenchmarkItem, ScoredItem
from rewards.base import Score


def item(uid: str = "x:1", answer: str = "A", meta: dict[str, Any] | None = None, **values: Any) -> BenchmarkItem:
    """An item with two options (none for `options=()`)."""
    judge = values.pop("needs_judge", False)
    sample = Sample(
        uid=uid,
        problem=values.pop("problem", "<video>\nWhich?"),
        answer=answer,
        problem_type=values.pop("problem_type", "multiple choice"),
        data_type="video",
        options=values.pop("options", ("A. one", "B. two")),
        videos=(MediaRef("v.mp4"),),
        extra=values.pop("extra", {}),
    )
    assert not values
    return BenchmarkItem(uid=uid, sample=sample, meta=meta or {}, needs_judge=judge)


def scored(value: float | None, entry: BenchmarkItem | None = None, response: str = "", **meta: Any) -> ScoredItem:
    """An item with the same verdict in both readings; None = not judged."""
    entry = entry or item(meta=meta)
    if value is None:
        score = Score(0.0, 0.0, 0.0, status="not_judged", reason="no judge")
        return ScoredItem(entry, "not_judged", score, score, response)
    score = Score(value, 1.0, value)
    return ScoredItem(entry, "ok", score, score, response)


def write_json(path: Path, value: Any) -> Path:
    """A JSON file, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """A JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    """A Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
