"""Fill the clip cache ahead of training: what to decode, how large it will be, and decoding it in many processes."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.files import write_lines
from datamodules.common.places import ROOT
from datamodules.common.worker_handle import Reply
from datamodules.common.workers import WorkerPool
from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.artifacts import SUFFIX as ARTIFACT_SUFFIX
from datamodules.video.cache import VideoCache, content_identity, decode_here
from datamodules.video.service import ATTEMPTS, Refused, build_decoder, outcome, refusing
from datamodules.video.spec import VideoSpec

if TYPE_CHECKING:
    from datamodules.prepare import SamplePreparer
    from datamodules.types import Sample

logger = logging.getLogger(__name__)

EXPECTED_RATIO = {"raw": 1.0, "lossless": 0.3, "jpeg": 0.1}
"""Stored bytes per uint8 byte, for estimates: above the median of natural videos."""


@dataclass(frozen=True)
class Job:
    """One clip to decode and store."""

    ref: MediaRef
    spec: VideoSpec
    uids: tuple[str, ...]
    """Samples that use the clip."""
    frame_bytes: int
    """uint8 bytes of its frames."""


@dataclass(frozen=True)
class Failure:
    """A clip that cannot be cached, for one of its samples."""

    id: str
    path: str
    reason: str


@dataclass
class Work:
    """What there is to do before training can run from the cache."""

    jobs: list[Job] = field(default_factory=list)
    num_cached: int = 0
    """Clips that are already there."""
    cached_bytes: int = 0
    """Their size."""
    failures: list[Failure] = field(default_factory=list)
    """Clips that cannot be read at all."""
    num_references: int = 0
    """Videos named by samples, duplicates counted."""

    def estimated_bytes(self, codec: str) -> int:
        """Expected size on disk of all jobs."""
        return int(sum(job.frame_bytes for job in self.jobs) * EXPECTED_RATIO[codec])


@dataclass(frozen=True)
class Done:
    """One finished job."""

    job: Job
    num_bytes: int
    error: MediaError | None = None


def plan_work(samples: Iterable[Sample], preparer: SamplePreparer) -> Work:
    """Find the clips of `samples` that the cache does not hold yet; every clip once.

    Raises:
        ValueError: the cache has no folder.
    """
    cache, work = preparer.cache, Work()
    users: dict[Path, list[str]] = {}
    clips: dict[Path, tuple[MediaRef, VideoSpec]] = {}
    for sample in samples:
        for ref in sample.videos:
            work.num_references += 1
            if ref.path.endswith(ARTIFACT_SUFFIX):
                continue
            spec = preparer.spec_for(ref)
            path = cache.entry_path(ref, spec)
            users.setdefault(path, []).append(sample.uid)
            clips.setdefault(path, (ref, spec))
    for path, (ref, spec) in clips.items():
        try:
            if cache.has(ref, spec):
                work.num_cached += 1
                work.cached_bytes += path.stat().st_size
                continue
            source = cache.source(ref)
            cache.check_quarantine(ref, content_identity(source))
            plan = cache.plan(ref, spec)
        except MediaError as error:
            work.failures += [Failure(uid, ref.path, error.reason) for uid in users[path]]
            continue
        size = plan.num_frames * 3 * plan.height * plan.width
        work.jobs.append(Job(ref, spec, tuple(users[path]), size))
    return work


def check_space(cache: VideoCache, needed: int, kept: int = 0) -> int:
    """Bytes that may be written: the disk's free space, or less where the cache has a limit.

    Args:
        cache: where to.
        needed: bytes of what will be stored.
        kept: bytes of what is there and must stay.

    Raises:
        ValueError: less than `needed`.
    """
    place = cache.root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(f"about {_size(needed)} are needed in {cache.root}, {_size(free)} are free")
    if cache.max_bytes is None:
        return free
    if needed + kept > cache.max_bytes:
        raise ValueError(
            f"about {_size(needed + kept)} are needed in {cache.root}, data.cache_max_gb allows "
            f"{_size(cache.max_bytes)}: the clips would push each other out. Raise it, or store smaller clips "
            "(data.cache_codec, data.max_frames)"
        )
    return min(free, cache.max_bytes - kept)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2g} MB"


@dataclass(frozen=True)
class Storing:
    """Builds, in a process, the function that decodes a clip straight into `cache`; only its size travels back."""

    cache: VideoCache

    def __call__(self) -> Callable[[Job], int | Refused]:
        """Import what decoding needs, before the first deadline starts."""
        build_decoder()
        return refusing(self._store)

    def _store(self, job: Job) -> int:
        frames, plan = decode_here(self.cache.source(job.ref), job.ref, job.spec)
        try:
            self.cache.put(job.ref, job.spec, frames, plan)
        except OSError as error:
            raise MediaError(job.ref.path, f"cannot be stored in the cache ({error})", permanent=False) from error
        return self.cache.entry_path(job.ref, job.spec).stat().st_size


def run_local(jobs: Sequence[Job], cache: VideoCache, workers: int, timeout_s: float) -> Iterator[Done]:
    """Do the jobs in `workers` decoder processes of this machine; yields in order of completion."""
    pool = WorkerPool(Storing(cache), max(1, workers), attempts=ATTEMPTS)
    waiting: dict[Future[Reply], Job] = {}
    try:
        for job in jobs:
            waiting[pool.submit(job, timeout_s)] = job
            if len(waiting) >= 2 * pool.processes:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield _done(waiting.pop(future), future)
        for future in as_completed(waiting):
            yield _done(waiting[future], future)
    finally:
        pool.close()


def _done(job: Job, future: Future[Reply]) -> Done:
    try:
        return Done(job, outcome(future, job.ref.path))
    except MediaError as error:
        return Done(job, 0, error)


def run_ray(
    jobs: Sequence[Job], cache: VideoCache, workers: int | None, timeout_s: float, address: str | None = None
) -> Iterator[Done]:
    """Do the jobs as Ray tasks, one CPU each, on all nodes of a cluster; media and cache must be shared folders.

    Args:
        jobs: what to do.
        cache: where to.
        workers: jobs in flight; None = twice the cluster's CPUs.
        timeout_s: seconds per clip.
        address: the cluster; None = the one this process is connected to, else a new local one.
    """
    import ray

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}}
    task = ray.remote(num_cpus=1, max_retries=2, runtime_env=environment)(_ray_store)
    limit = workers or max(1, int(ray.cluster_resources().get("CPU", 1))) * 2
    build = pickle.dumps(Storing(cache))
    waiting: list[Any] = []
    for job in jobs:
        waiting.append(task.remote(build, job, timeout_s))
        while len(waiting) >= limit:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            yield ray.get(ready)
    while waiting:
        (ready,), waiting = ray.wait(waiting, num_returns=1)
        yield ray.get(ready)


def _ray_store(build: bytes, job: Job, timeout_s: float) -> Done:
    """Runs in a Ray worker."""
    return _done(job, _ray_pool(build).submit(job, timeout_s))


@lru_cache(maxsize=1)
def _ray_pool(build: bytes) -> WorkerPool:
    """The decoder process of a Ray worker, kept for its next jobs."""
    return WorkerPool(pickle.loads(build), 1, attempts=ATTEMPTS)


def record(
    work: Work, results: Iterable[Done], cache: VideoCache, progress: Callable[[str], None], every_s: float = 5.0
) -> tuple[int, int, list[Failure]]:
    """Collect results, quarantine what is broken, write `failures.jsonl`, report progress with the time left.

    Returns:
        (clips stored, bytes stored, all failures including those of planning).
    """
    failures, stored, size = list(work.failures), 0, 0
    write_failures(cache.root / "failures.jsonl", failures)
    began = reported = time.monotonic()
    total = max(1, sum(job.frame_bytes for job in work.jobs))
    handled = 0
    for number, result in enumerate(results, 1):
        handled += result.job.frame_bytes
        if result.error is None:
            stored, size = stored + 1, size + result.num_bytes
        else:
            failures += [Failure(uid, result.job.ref.path, result.error.reason) for uid in result.job.uids]
            # Deleted meanwhile: nothing to remember.
            with contextlib.suppress(MediaError):
                cache.set_aside(result.job.ref, content_identity(cache.source(result.job.ref)), result.error)
            write_failures(cache.root / "failures.jsonl", failures)
        now = time.monotonic()
        if now - reported >= every_s or number == len(work.jobs):
            left = timedelta(seconds=round((now - began) * (total - handled) / max(1, handled)))
            progress(f"{number}/{len(work.jobs)} clips, {size / 1e6:.1f} MB, {left} left")
            reported = now
    return stored, size, failures


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """One JSON line per sample: id, path, reason. Replaces the file of the previous run."""
    write_lines(path, map(asdict, failures))
