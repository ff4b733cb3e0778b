"""A verified cache of sampled, resized clips: decode once, load everywhere, never a wrong frame.

A file's name covers the video's path relative to the media root, the used part and every field of the spec; its
header also covers the content of the source (size and a hash of sampled blocks). A copy of media and cache on another
machine therefore matches, a changed source or spec does not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from datamodules.errors import MediaError
from datamodules.types import MediaRef, PreparedVideo
from datamodules.video.artifacts import SUFFIX as ARTIFACT_SUFFIX
from datamodules.video.artifacts import artifact_plan, read_artifact
from datamodules.video.codecs import get_codec
from datamodules.video.decode import decode_spec
from datamodules.video.entry import (
    EntryError,
    EntryHeader,
    as_prepared,
    content_digest,
    plan_from,
    read_entry,
    read_header,
    write_entry,
)
from datamodules.video.maintenance import evict, stage, used_bytes
from datamodules.video.probe import probe
from datamodules.video.quarantine import Quarantine

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from datamodules.video.spec import VideoPlan, VideoSpec

    Decode = Callable[[Path, MediaRef, VideoSpec], tuple[np.ndarray, VideoPlan]]

logger = logging.getLogger(__name__)

SourceMode = Literal["prefer_cache", "cache_only", "decode"]
SOURCE_MODES = ("prefer_cache", "cache_only", "decode")
SUFFIX = ".clip"
BLOCK = 65536
NUM_BLOCKS = 16


class VideoCache:
    """Loads clips from `folder`, and fills it from the sources.

    Args:
        folder: where the clips lie; None = nothing is stored.
        media_root: relative paths of records start here.
        codec: `raw`, `lossless` or `jpeg` for new entries; existing ones are read whatever their codec.
        source_mode: `prefer_cache` decodes and stores what is missing, `cache_only` reports it as lost, `decode`
            neither reads nor writes the cache.
        max_bytes: evict the clips that were used longest ago above this size; None = no limit.
        stage_dir: node-local folder into which clips are copied before use (for slow shared storage).
        threads: threads per clip for (de)compression.
        decode_clip: how a clip is decoded; None = in this process.
    """

    def __init__(
        self,
        folder: str | Path | None,
        media_root: str | Path | None = None,
        codec: str = "lossless",
        source_mode: SourceMode = "prefer_cache",
        max_bytes: int | None = None,
        stage_dir: str | Path | None = None,
        threads: int = 2,
        decode_clip: Decode | None = None,
    ) -> None:
        if source_mode not in SOURCE_MODES:
            raise ValueError(f"source_mode={source_mode!r} is unknown; use one of {', '.join(SOURCE_MODES)}")
        if source_mode == "cache_only" and folder is None:
            raise ValueError("source_mode=cache_only needs cache_dir")
        get_codec(codec)
        self.folder = None if folder is None or source_mode == "decode" else Path(folder).absolute()
        self.media_root = None if media_root is None else Path(media_root).absolute()
        self.codec = codec
        self.source_mode = source_mode
        self.max_bytes = max_bytes
        self._room = 0
        """Bytes that may be written before the cache's size is looked at again."""
        self.stage_dir = None if stage_dir is None else Path(stage_dir)
        self.threads = threads
        self.decode_clip = decode_clip or decode_here
        self.quarantine = None if folder is None else Quarantine(Path(folder) / "quarantine.jsonl")
        names = ("hit", "built", "rebuilt", "decoded", "not_stored", "bad", "quarantined")
        self.counters: dict[str, int] = dict.fromkeys(names, 0)

    @property
    def root(self) -> Path:
        """`folder`. Raises ValueError when the cache has none."""
        if self.folder is None:
            raise ValueError("this cache stores nothing (no cache_dir, or source_mode=decode)")
        return self.folder

    def source(self, ref: MediaRef) -> Path:
        """Where the video of `ref` lies on this machine."""
        path = Path(ref.path)
        return path if path.is_absolute() or self.media_root is None else self.media_root / path

    def name(self, ref: MediaRef) -> str:
        """The video's path as the key sees it: relative to the media root where possible."""
        path = self.source(ref)
        if self.media_root is not None:
            try:
                return path.absolute().relative_to(self.media_root.absolute()).as_posix()
            except ValueError:
                pass
        return path.absolute().as_posix()

    def logical_key(self, ref: MediaRef, spec: VideoSpec) -> dict[str, Any]:
        """What the caller asks for: video, part and spec."""
        return {"video": self.name(ref), "start": ref.start, "end": ref.end, "spec": spec.fingerprint()}

    def entry_path(self, ref: MediaRef, spec: VideoSpec) -> Path:
        """The cache file of a clip.

        Raises:
            ValueError: the cache has no folder.
        """
        text = json.dumps(self.logical_key(ref, spec), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self.root / digest[:2] / f"{digest}{SUFFIX}"

    def get(self, ref: MediaRef, spec: VideoSpec) -> PreparedVideo | None:
        """The cached clip, verified; None when there is none that fits the source as it is now."""
        if self.folder is None:
            return None
        path = self.entry_path(ref, spec)
        try:
            stored = path if self.stage_dir is None else stage(path, self.stage_dir / path.parent.name / path.name)
            frames, header = read_entry(stored, threads=self.threads)
        except FileNotFoundError:
            return None
        except EntryError as error:
            logger.warning("dropping a cache entry: %s", error)
            self._drop_staged(path)
            try:
                path.unlink(missing_ok=True)
            except OSError as problem:
                logger.warning("cannot remove the damaged cache entry %s (%s)", path, problem)
            return None
        if not self._matches(header, ref, spec):
            logger.info("%s changed since it was cached; decoding it again", ref.path)
            self._drop_staged(path)
            return None
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(path)  # remember the use for eviction
        self.counters["hit"] += 1
        return as_prepared(frames, plan_from(header.plan), header.digest, header.producer.get("decoder", ""))

    def put(self, ref: MediaRef, spec: VideoSpec, frames: np.ndarray, plan: VideoPlan) -> EntryHeader:
        """Store a decoded clip.

        Raises:
            OSError: it cannot be written (disk full, no permission); nothing is left behind.
        """
        path = self.entry_path(ref, spec)
        key = {**self.logical_key(ref, spec), "content": content_identity(self.source(ref))}
        header = write_entry(path, frames, plan, key, self.codec, producer(spec.decoder), self.threads)
        self._drop_staged(path)
        if not self._make_room(path.stat().st_size):
            path.unlink(missing_ok=True)
            raise OSError(errno.ENOSPC, "data.cache_max_gb is reached, and all clips were used a moment ago", str(path))
        return header

    def _make_room(self, added: int) -> bool:
        """Evict when the limit may be exceeded; whether it holds.

        Other processes write too. All look again after a thousandth of the limit: often enough to keep it, while
        listing a big cache for every clip would cost more than decoding.
        """
        if self.max_bytes is None:
            return True
        self._room -= added
        if self._room >= 0:
            return True
        used = used_bytes(self.root)
        if used > self.max_bytes:
            evict(self.root, self.max_bytes - self.max_bytes // 100)
            used = used_bytes(self.root)
        self._room = min((self.max_bytes - used) // 4, self.max_bytes // 1000)
        return used <= self.max_bytes

    def load(self, ref: MediaRef, spec: VideoSpec) -> PreparedVideo:
        """The clip of `ref`: from the cache, or decoded (and stored) according to `source_mode`.

        Raises:
            MediaError: missing, damaged, or not in the cache under `cache_only`.
        """
        if ref.path.endswith(ARTIFACT_SUFFIX):
            return read_artifact(self.source(ref), spec)
        found = self.get(ref, spec)
        if found is not None:
            return found
        if self.source_mode == "cache_only":
            raise MediaError(
                ref.path, "is not in the cache (source_mode=cache_only); run scripts/preprocess_videos.py", False
            )
        frames, plan = self._decoded(ref, spec)
        if self.folder is None:
            self.counters["decoded"] += 1
            return as_prepared(frames, plan, content_digest(frames, plan), spec.decoder)
        existed = self.entry_path(ref, spec).exists()
        try:
            header = self.put(ref, spec, frames, plan)
        except OSError as error:
            # Training goes on from memory; the next epoch pays the decode again.
            self.counters["not_stored"] += 1
            logger.warning("cannot store %s in the cache (%s); using it from memory", ref.path, error)
            return as_prepared(frames, plan, content_digest(frames, plan), spec.decoder)
        self.counters["rebuilt" if existed else "built"] += 1
        if get_codec(self.codec).lossy:
            # Every pass must see the same pixels, the first one too.
            frames, header = read_entry(self.entry_path(ref, spec), threads=self.threads)
        return as_prepared(frames, plan, header.digest, spec.decoder)

    def plan(self, ref: MediaRef, spec: VideoSpec) -> VideoPlan:
        """Which frames `load` will give and at what size, from metadata alone.

        Raises:
            MediaError: the video cannot be read.
        """
        source = self.source(ref)
        if ref.path.endswith(ARTIFACT_SUFFIX):
            return artifact_plan(source, spec)
        return spec.plan(probe(source), ref.start, ref.end, source)

    def _decoded(self, ref: MediaRef, spec: VideoSpec) -> tuple[np.ndarray, VideoPlan]:
        content = content_identity(self.source(ref))
        self.check_quarantine(ref, content)
        try:
            return self.decode_clip(self.source(ref), ref, spec)
        except MediaError as error:
            self.counters["bad"] += 1
            self.set_aside(ref, content, error)
            raise

    def check_quarantine(self, ref: MediaRef, content: str) -> None:
        """Raise MediaError when the file with this content has been found unusable."""
        reason = None if self.quarantine is None else self.quarantine.reason(self.quarantine_name(ref), content)
        if reason is not None:
            self.counters["quarantined"] += 1
            raise MediaError(ref.path, f"quarantined: {reason}")

    def set_aside(self, ref: MediaRef, content: str, error: MediaError) -> None:
        """Remember what is wrong with a medium, where trying again cannot help."""
        if self.quarantine is not None and error.permanent:
            self.quarantine.add(self.quarantine_name(ref), content, error.reason)

    def quarantine_name(self, ref: MediaRef) -> str:
        """How the quarantine list calls a medium: its name, with the used part where there is one."""
        part = "" if ref.start is None and ref.end is None else f"@{ref.start}-{ref.end}"
        return self.name(ref) + part

    def has(self, ref: MediaRef, spec: VideoSpec) -> bool:
        """Whether a fitting entry exists; its header is checked, its frames are not read."""
        try:
            return self.folder is not None and self._matches(read_header(self.entry_path(ref, spec)), ref, spec)
        except (FileNotFoundError, EntryError):
            return False

    def _matches(self, header: EntryHeader, ref: MediaRef, spec: VideoSpec) -> bool:
        stored = dict(header.key)
        content = stored.pop("content", None)
        if stored != json.loads(json.dumps(self.logical_key(ref, spec))):
            return False
        source = self.source(ref)
        # A node that holds only the cache can still use it.
        return not source.exists() or content_identity(source) == content

    def _drop_staged(self, path: Path) -> None:
        if self.stage_dir is not None:
            (self.stage_dir / path.parent.name / path.name).unlink(missing_ok=True)


def decode_here(path: Path, ref: MediaRef, spec: VideoSpec) -> tuple[np.ndarray, VideoPlan]:
    """Decode a clip in this process. Raises MediaError."""
    return decode_spec(path, spec, ref.start, ref.end)


def content_identity(path: Path) -> str:
    """Size and a hash of sampled blocks of a file: equal for copies, different after a change.

    Raises:
        MediaError: the file cannot be read.
    """
    try:
        state = path.stat()
        return _identity(str(path), state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise MediaError(path, f"cannot be read ({error.strerror})", permanent=False) from error


@lru_cache(maxsize=65536)
def _identity(path: str, size: int, _mtime: int) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        if size <= BLOCK * NUM_BLOCKS:
            state.update(file.read())
        else:
            for i in range(NUM_BLOCKS):
                file.seek((size - BLOCK) * i // (NUM_BLOCKS - 1))
                state.update(file.read(BLOCK))
    return f"{size}-{state.hexdigest()}"


def producer(decoder: str) -> dict[str, str]:
    """Decoder and versions, stored with an entry for information."""
    names = {"decoder": decoder}
    for package in ("av", "torchcodec", "decord", "torchvision"):
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            continue
    return names
