"""Annotation files in the formats they are published in: JSON, JSONL, Parquet, CSV, TSV, also gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All records of a file.

    A JSON mapping of mappings becomes a list with the key as field `_key`; a mapping that holds one list is that list.

    Raises:
        ValueError: the format is unknown, or the file is damaged; the message names the file (and line).
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    if kind == ".parquet":
        return _parquet(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if kind == ".jsonl":
        return _jsonl(path, text)
    if kind == ".json":
        return _json(path, text)
    if kind in (".csv", ".tsv"):
        csv.field_size_limit(2**31 - 1)
        return [dict(row) for row in csv.DictReader(io.StringIO(text), delimiter="\t" if kind == ".tsv" else ",")]
    raise ValueError(f"{path}: unknown annotation format {path.suffix!r}; use json, jsonl, parquet, csv or tsv")


def _parquet(path: Path) -> list[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _jsonl(path: Path, text: str) -> list[Record]:
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
                # Some published files hold every record as JSON inside of a JSON string.
                records.append(json.loads(record) if isinstance(record, str) else record)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error})") from error
    return _checked(path, records)


def _json(path: Path, text: str) -> list[Record]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":  # JSONL in spite of its name
            return _jsonl(path, text)
        raise ValueError(f"{path}: no JSON ({error})") from error
    if isinstance(value, dict):
        lists = [entry for entry in value.values() if isinstance(entry, list)]
        if len(lists) == 1:
            value = lists[0]
        elif value and all(isinstance(entry, dict) for entry in value.values()):
            value = [{"_key": key, **entry} for key, entry in value.items()]
        else:
            value = [value]
    return _checked(path, value)


def _checked(path: Path, records: Any) -> list[Record]:
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} holds no list of records")
    return records
