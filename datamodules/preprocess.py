"""Fill the clip cache ahead of training: what to decode, how large it will be, and decoding it in many processes."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.files import write_lines
from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.artifacts import SUFFIX as ARTIFACT_SUFFIX
from datamodules.video.cache import content_identity
from datamodules.video.service import ROOT, DecodeService

if TYPE_CHECKING:
    from datamodules.prepare import SamplePreparer
    from datamodules.types import Sample
    from datamodules.video.cache import VideoCache
    from datamodules.video.spec import VideoSpec

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
                continue
            source = cache.source(ref)
            reason = cache.quarantine.reason(cache.quarantine_name(ref), content_identity(source))
            if reason is not None:
                raise MediaError(ref.path, f"quarantined: {reason}")
            plan = cache.plan(ref, spec)
        except MediaError as error:
            work.failures += [Failure(uid, ref.path, error.reason) for uid in users[path]]
            continue
        size = plan.num_frames * 3 * plan.height * plan.width
        work.jobs.append(Job(ref, spec, tuple(users[path]), size))
    return work


def check_space(folder: Path, needed: int) -> int:
    """Free bytes of the disk that holds `folder`.

    Raises:
        ValueError: less is free than needed.
    """
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(f"about {needed / 1e9:.1f} GB are needed in {folder}, {free / 1e9:.1f} GB are free")
    return free


def store_request(job: Job, cache: VideoCache) -> dict[str, Any]:
    """What a decode worker needs to know to do a job."""
    root = None if cache.media_root is None else str(cache.media_root.absolute())
    return {
        "op": "store",
        "folder": str(cache.folder.absolute()),
        "media_root": root,
        "codec": cache.codec,
        "ref": asdict(job.ref),
        "spec": asdict(job.spec),
    }


def run_local(jobs: Sequence[Job], cache: VideoCache, workers: int, timeout_s: float) -> Iterator[Done]:
    """Do the jobs in `workers` decoder processes of this machine; yields in order of completion."""
    service = DecodeService(timeout_s)

    def work(job: Job) -> Done:
        return _done(job, lambda: service.request(store_request(job, cache), job.ref.path)[0])

    try:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            yield from _bounded(jobs, lambda job: pool.submit(work, job), max(1, workers) * 2)
    finally:
        service.close()


def _bounded(jobs: Sequence[Job], submit: Callable[[Job], Future], limit: int) -> Iterator[Done]:
    waiting: set[Future] = set()
    for job in jobs:
        waiting.add(submit(job))
        if len(waiting) >= limit:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    for future in waiting:
        yield future.result()


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
    waiting: dict[Any, Job] = {}

    def finished() -> Iterator[Done]:
        ready, _ = ray.wait(list(waiting), num_returns=1)
        for reference in ready:
            yield _ray_done(waiting.pop(reference), ray.get(reference))

    for job in jobs:
        waiting[task.remote(store_request(job, cache), job.ref.path, timeout_s)] = job
        while len(waiting) >= limit:
            yield from finished()
    while waiting:
        yield from finished()


_ray_service: DecodeService | None = None


def _ray_store(request: dict[str, Any], path: str, timeout_s: float) -> dict[str, Any]:
    """Runs in a Ray worker; the decoder process is kept for the next job."""
    global _ray_service
    if _ray_service is None or _ray_service.timeout_s != timeout_s:
        _ray_service = DecodeService(timeout_s)
    try:
        return {**_ray_service.request(request, path)[0], "host": socket.gethostname()}
    except MediaError as error:
        return {"error": error.reason, "permanent": error.permanent}


def _ray_done(job: Job, reply: dict[str, Any]) -> Done:
    if "error" in reply:
        return Done(job, 0, MediaError(job.ref.path, reply["error"], reply["permanent"]))
    return Done(job, reply["bytes"])


def _done(job: Job, call: Callable[[], dict[str, Any]]) -> Done:
    try:
        return Done(job, call()["bytes"])
    except MediaError as error:
        return Done(job, 0, error)


def record(
    work: Work, results: Iterable[Done], cache: VideoCache, progress: Callable[[str], None], every_s: float = 5.0
) -> tuple[int, int, list[Failure]]:
    """Collect results, quarantine what is broken, write `failures.jsonl`, report progress with the time left.

    Returns:
        (clips stored, bytes stored, all failures including those of planning).
    """
    failures, stored, size = list(work.failures), 0, 0
    write_failures(cache.folder / "failures.jsonl", failures)
    began = reported = time.monotonic()
    total = max(1, sum(job.frame_bytes for job in work.jobs))
    handled = 0
    for number, result in enumerate(results, 1):
        handled += result.job.frame_bytes
        if result.error is None:
            stored, size = stored + 1, size + result.num_bytes
        else:
            failures += [Failure(uid, result.job.ref.path, result.error.reason) for uid in result.job.uids]
            _quarantine(result, cache)
            write_failures(cache.folder / "failures.jsonl", failures)
        now = time.monotonic()
        if now - reported >= every_s or number == len(work.jobs):
            left = (now - began) * (total - handled) / max(1, handled)
            progress(f"{number}/{len(work.jobs)} clips, {size / 1e6:.1f} MB, {_clock(left)} left")
            reported = now
    return stored, size, failures


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """One JSON line per sample: id, path, reason. Replaces the file of the previous run."""
    write_lines(path, map(asdict, failures))


def _quarantine(result: Done, cache: VideoCache) -> None:
    if result.error.permanent:
        ref = result.job.ref
        try:
            content = content_identity(cache.source(ref))
        except MediaError:
            # Deleted meanwhile: nothing to remember.
            return
        cache.quarantine.add(cache.quarantine_name(ref), content, result.error.reason)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
