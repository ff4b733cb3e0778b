"""Remember media that cannot be used, with the reason, across runs. An entry lapses when the file changes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from datamodules.common.files import json_line, write_lines
from datamodules.records import json_lines

logger = logging.getLogger(__name__)


class Quarantine:
    """A JSON-lines file of bad media; safe to append to from many processes.

    Args:
        path: the file; created with the first entry.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._state: tuple[int, int] | None = None
        self._entries: dict[tuple[str, str], str] = {}

    def reason(self, name: str, content: str) -> str | None:
        """Why the medium is quarantined, or None. `content` is the file's identity, see `content_identity`."""
        return self._load().get((name, content))

    def entries(self) -> list[dict[str, str]]:
        """All entries: name, content, reason."""
        return [{"name": name, "content": content, "reason": why} for (name, content), why in self._load().items()]

    def add(self, name: str, content: str, reason: str) -> None:
        """Record a bad medium; a read-only folder is not an error (the medium is skipped anyway)."""
        line = json_line({"name": name, "content": content, "reason": reason, "time": time.time()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write of one line: appends of several processes do not mix.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("cannot record %s in %s (%s)", name, self.path, error)

    def clear(self, name: str | None = None) -> int:
        """Forget one medium, or all; returns how many entries went."""
        kept = [] if name is None else [entry for entry in self.entries() if entry["name"] != name]
        count = len(self._load()) - len(kept)
        if not count:
            return 0
        write_lines(self.path, kept)
        return count

    def _load(self) -> dict[tuple[str, str], str]:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            self._state, self._entries = None, {}
            return self._entries
        if self._state != (state.st_size, state.st_mtime_ns):
            self._entries = {}
            for _, entry in json_lines(self.path.read_text(encoding="utf-8")):
                try:
                    self._entries[entry["name"], entry["content"]] = entry["reason"]
                except (KeyError, TypeError):
                    # A line torn by a full disk; the medium will be found bad again.
                    continue
            self._state = (state.st_size, state.st_mtime_ns)
        return self._entries
