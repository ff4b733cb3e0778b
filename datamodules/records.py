"""Read files of records: JSON, JSON lines, CSV and TSV (each also gzipped), Parquet, and saved `datasets` folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (1-based line or row, record).

    A JSON file holds an array, an object whose only array is the records, an object of objects (each becomes a record
    with its key as `_key`), one record, or JSON lines in spite of its name. A line that is not valid JSON is yielded as
    its text, so that the caller reports it with its number. Empty cells of Parquet files and `datasets` are left out.

    Raises:
        ValueError: the file does not exist, has an unknown extension, or is damaged; the message names file and line.
    """
    if path.is_dir():
        yield from _dataset_folder(path)
        return
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if kind == ".jsonl":
        yield from json_lines(_text(path))
    elif kind == ".json":
        yield from _json(_text(path), path)
    elif kind == ".parquet":
        yield from _parquet(path)
    elif kind in (".csv", ".tsv"):
        csv.field_size_limit(2**31 - 1)
        rows = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter="\t" if kind == ".tsv" else ",")
        yield from enumerate(map(dict, rows), 1)
    else:
        raise ValueError(f"{path}: unknown extension; use .json, .jsonl, .csv, .tsv, .parquet or a datasets folder")


def read_objects(path: Path) -> list[Record]:
    """All records of a file of objects.

    Raises:
        ValueError: as `read_records`, or a record is not an object; the message names its line.
    """
    records = []
    for number, record in read_records(path):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object: {str(record)[:80]!r}")
        records.append(record)
    return records


def json_lines(text: str) -> Iterator[tuple[int, Any]]:
    """(1-based line, value) of JSON lines; what is not valid JSON is yielded as its text, blank lines are passed over.

    Only a newline ends a line: `str.splitlines` would cut records at the U+2028 or U+0085 of a text.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            # Some published files hold every record as JSON inside a JSON string.
            yield number, json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            yield number, line


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.name.lower().endswith(".gz") else data).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or not UTF-8 text ({error})") from error


def _json(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "[":
        yield from _array(text, start, path)
        return
    if text[start : start + 1] != "{":
        raise ValueError(f"{path} holds neither a JSON array nor an object")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        yield from json_lines(text)
        return
    lists = [value for value in data.values() if isinstance(value, list)]
    if len(lists) == 1:
        yield from enumerate(lists[0], 1)
    elif data and all(isinstance(value, dict) for value in data.values()):
        yield from enumerate(({"_key": key, **value} for key, value in data.items()), 1)
    else:
        yield 1, data


def _array(text: str, start: int, path: Path) -> Iterator[tuple[int, Any]]:
    """The records of an array one by one, with the line on which each begins."""
    decoder = json.JSONDecoder()
    position, before, line = start + 1, 0, 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text):
            raise ValueError(f"{path} ends inside its array (truncated?)")
        if text[position] == "]":
            return
        line += text.count("\n", before, position)
        before = position
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
        yield line, record


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = (row for batch in pyarrow.parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from enumerate(map(_filled, rows), 1)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error})") from error


def _dataset_folder(path: Path) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"folder {path} is not a saved Hugging Face dataset ({error})") from error
    if isinstance(data, datasets.DatasetDict):
        splits = ", ".join(data)
        if len(data) > 1:
            raise ValueError(
                f"folder {path} holds several splits ({splits}); name one, for example {path}/{next(iter(data))}"
            )
        data = next(iter(data.values()))
    yield from enumerate(map(_filled, data), 1)


def _filled(row: Record) -> Record:
    """A row without its empty cells: a table has every column in every row."""
    return {key: value for key, value in row.items() if value is not None}
