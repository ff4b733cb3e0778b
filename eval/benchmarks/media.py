"""Where a benchmark's media lie on this disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datamodules.video.frame_folder import is_frame_folder


class MediaFinder:
    """Finds media below the benchmark's folders and remembers what is missing.

    Args:
        folders: tried in order; a file that is in none is expected in the first.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.missing: set[str] = set()
        self.num_without_subtitles = 0
        self.broken_subtitles: list[str] = []
        self._known: dict[str, Path | None] = {}
        self._sizes: dict[str, int] = {}

    def find(self, relative: str) -> Path | None:
        """The file (or folder of frames), or None. `videos/` in front of the path and its plain name are tried too."""
        if relative not in self._known:
            clean = relative.removeprefix("./")
            names = dict.fromkeys([clean, f"videos/{clean}", Path(clean).name, f"videos/{Path(clean).name}"])
            places = (folder / name for folder in self.folders for name in names if name)
            self._known[relative] = next((p for p in places if p.is_file() or is_frame_folder(p)), None)
        return self._known[relative]

    def first(self, candidates: Sequence[str]) -> str | None:
        """Absolute path of the first candidate that exists, or None."""
        return next((str(found) for candidate in candidates if (found := self.find(candidate))), None)

    def place(self, candidates: Sequence[str]) -> str:
        """Absolute path of the first candidate that exists; else where the first is expected, noted as missing."""
        if found := self.first(candidates):
            return found
        expected = str(self.folders[0] / candidates[0].removeprefix("./"))
        self.missing.add(expected)
        return expected

    def size(self, path: str) -> int:
        """Bytes of a file or of all files of a folder; 0 when there is none."""
        if path not in self._sizes:
            place = Path(path)
            files = place.iterdir() if place.is_dir() else [place]
            self._sizes[path] = sum(file.stat().st_size for file in files if file.is_file())
        return self._sizes[path]
