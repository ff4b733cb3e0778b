"""Iterate over the raw records of an annotation file together with their line numbers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (1-based line or row, record).

    JSON files hold one array, or an object whose only array is the records. A JSONL line that is not JSON is yielded as
    its text, so that the caller reports it with the line.

    Raises:
        ValueError: the file does not exist, has an unknown extension, or is not JSON.
    """
    if path.is_dir():
        yield from _dataset_folder(path)
        return
    if not path.is_file():
        raise ValueError(f"annotation file {path} does not exist")
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        yield from _jsonl(_text(path))
    elif name.endswith(".json"):
        yield from _json(_text(path), path)
    elif name.endswith(".parquet"):
        yield from _parquet(path)
    else:
        raise ValueError(f"annotation file {path}: unknown extension; use .json, .jsonl, .parquet or a datasets folder")


def _text(path: Path) -> str:
    try:
        if path.name.endswith(".gz"):
            return gzip.decompress(path.read_bytes()).decode("utf-8-sig")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"annotation file {path} is not UTF-8 text ({error})") from error


def _jsonl(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError:
                yield number, line


def _json(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    body = text.lstrip()
    if body.startswith("{"):
        yield from enumerate(_only_list(text, path), 1)
        return
    if not body.startswith("["):
        raise ValueError(f"annotation file {path} holds neither a JSON array nor an object")
    decoder = json.JSONDecoder()
    position, line = text.index("[") + 1, 1 + text[: text.index("[")].count("\n")
    before = text.index("[")
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text):
            raise ValueError(f"annotation file {path} ends inside its array (truncated?)")
        if text[position] == "]":
            return
        line += text.count("\n", before, position)
        before = position
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"annotation file {path}, line {error.lineno}: {error.msg}") from error
        yield line, record


def _only_list(text: str, path: Path) -> list[Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"annotation file {path}, line {error.lineno}: {error.msg}; is it JSONL?") from error
    lists = [value for value in data.values() if isinstance(value, list)]
    if len(lists) != 1:
        raise ValueError(f"annotation file {path}: expected one array of records, found {len(lists)} arrays")
    return lists[0]


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        row = 0
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, {key: value for key, value in record.items() if value is not None}
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"annotation file {path} is not Parquet ({error})") from error


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
    for row, record in enumerate(data, 1):
        yield row, {key: value for key, value in record.items() if value is not None}
