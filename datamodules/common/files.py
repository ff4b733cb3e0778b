"""Files that readers see whole or not at all, and folders that one process uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

LOCK_NAME = "lock"


def write_whole(path: str | Path, parts: Iterable[bytes]) -> None:
    """Write `parts` through a temporary file beside `path`: on an error the old file stays and nothing else is left.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:  # also an interrupt must not leave the temporary file behind
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all; the same content again is no write."""
    data = text.encode("utf-8", "surrogatepass")  # a model may emit lone surrogates, which plain UTF-8 refuses
    path = Path(path)
    with naming(path):
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return  # the same command again needs no room for what is there
    write_whole(path, [data])


def write_json(path: str | Path, value: Any, **options: Any) -> None:
    """Write a JSON file whole or not at all; `options` go to `json.dumps`."""
    write_text(path, json.dumps(value, **{"indent": 1, "ensure_ascii": False, **options}) + "\n")


def write_lines(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines whole or not at all."""
    write_text(path, "".join(json_line(record) for record in records))


def json_line(record: Mapping[str, Any]) -> str:
    """One record as one line."""
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an `OSError` of the body name the file: the errors of `write` do not."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class FolderInUse(RuntimeError):
    """Another process writes to the folder."""


class FolderLock:
    """Exclusive use of a run folder; the kernel releases it when the process ends, however it ends.

    Args:
        folder: created when it does not exist.
        wait_s: seconds to wait for another process to end; 0 = complain at once.

    Raises:
        FolderInUse: somebody else holds it; the message names the process.
    """

    def __init__(self, folder: str | Path, wait_s: float = 0.0) -> None:
        self.path = Path(folder) / LOCK_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not inherited over exec: a child that outlives us must not keep the folder.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                holder = self.path.read_text(encoding="utf-8").strip() or "an unknown process"
                os.close(self._descriptor)
                raise FolderInUse(
                    f"{self.path.parent} is being written by {holder}; wait for it, end it, or set another output_dir"
                ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give the folder back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
