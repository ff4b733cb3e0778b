"""Append-only records of an evaluation: one JSON line per item, on disk before the next one is believed.

A run folder belongs to one set of settings (its name ends in their hash) and to one process at a time. After any
end, `kill -9` included, the same command finds what is finished and does the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.common.files import json_line
from datamodules.video.cache import content_identity

log = logging.getLogger(__name__)


class MemoryLog:
    """Records keyed by `uid`, in memory only; the last one of a uid counts."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        """The newest record per uid."""

    def append(self, *records: Mapping[str, Any]) -> bool:
        """Add records. Returns False where they have to wait for a disk.

        Raises:
            ValueError: a record has no uid.
        """
        for record in records:
            if not record.get("uid"):
                raise ValueError(f"a record without a uid cannot be resumed: {dict(record)}")
            self.records[record["uid"]] = dict(record)
        return True


class RecordLog(MemoryLog):
    """A file of JSON lines keyed by `uid`; the last line of a uid counts.

    A half line at the end (the process was killed while writing) is cut off when the file is opened, so its item is
    simply missing. When the disk is full, nothing is lost while the process lives: lines wait in memory and are
    tried again with the next append.

    Args:
        path: the file; created with its folder.

    Example: `log.append({"uid": "charades:17", "text": "[1, 2]"})`, then `log.records["charades:17"]["text"]`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.problem = ""
        """Why the newest records are not on disk; empty when all are."""
        self._waiting: list[dict[str, Any]] = []
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data, self._end = _read_lines(self.path)
        if self._end != self.path.stat().st_size:
            os.ftruncate(self._descriptor, self._end)
        for record in data:
            self.records[record["uid"]] = record

    def append(self, *records: Mapping[str, Any]) -> bool:
        """Add records and wait until they are on disk. Returns False when they could not be written (see `problem`).

        Raises:
            ValueError: a record has no uid.
        """
        super().append(*records)
        self._waiting += map(dict, records)
        return self.flush()

    def flush(self) -> bool:
        """Write what waits. Returns whether everything is on disk."""
        if not self._waiting:
            return True
        data = "".join(map(json_line, self._waiting)).encode("utf-8", "surrogatepass")
        try:
            done = 0
            while done < len(data):  # `os.pwrite` may write less than it was given, at the end of the space above all
                written = os.pwrite(self._descriptor, data[done:], self._end + done)
                if written == 0:
                    raise OSError(f"wrote {done} of {len(data)} bytes")
                done += written
            os.fsync(self._descriptor)
        except OSError as error:
            try:  # half a line in the middle of the file would hide the next one
                os.ftruncate(self._descriptor, self._end)
            except OSError as problem:
                log.error("cannot cut %s back to its last whole line: %s", self.path, problem)
            if not self.problem:
                log.error("cannot write %s (%s); results stay in memory until it works again", self.path, error)
            self.problem = f"{self.path}: {error.strerror or error}"
            return False
        self._end += len(data)
        self._waiting.clear()
        self.problem = ""
        return True

    def close(self) -> None:
        """Try once more to write, then close the file."""
        if self._descriptor >= 0:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, bytes up to the end of the last whole line); lines that are not a record are skipped with a warning."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        log.warning("%s ends in half a line (%d bytes); its item is evaluated again", path, len(data) - end)
    records = []
    for number, line in enumerate(data[:end].splitlines(), start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("uid"), str):
                raise ValueError("no uid")
        except ValueError as error:
            log.warning("%s:%d is not a record (%s); its item is evaluated again", path, number, error)
            continue
        records.append(record)
    return records, end


def read_records(path: str | Path) -> dict[str, dict[str, Any]]:
    """The newest record per uid of a file that nobody writes to; empty when there is none."""
    path = Path(path)
    if not path.is_file():
        return {}
    return {record["uid"]: record for record in _read_lines(path)[0]}


def run_key(settings: Mapping[str, Any]) -> str:
    """Eight hex digits that name a set of settings: everything that may change an answer, and nothing else.

    Args:
        settings: JSON-able: model content, prompt style, frame policy, sampling, seed, benchmark version, ...
    """
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def model_identity(folder: str | Path) -> str:
    """Short hash of a model folder's content: configuration and templates whole, weights by size and sampled blocks.

    Raises:
        ValueError: the folder holds no config.json.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: not a Hugging Face model folder")
    digest = hashlib.sha256()
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin"):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name}={content_identity(path)};".encode())
    return digest.hexdigest()[:16]
