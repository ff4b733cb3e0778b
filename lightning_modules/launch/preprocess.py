"""Decode and cache every video of an experiment, from the same configuration as training.

python scripts/preprocess_videos.py experiment=qwen3vl_8b [workers=8] [launcher=ray] [address=HOST:PORT] [dry_run=true]
    [retry_quarantined=true] [list_quarantined=true] [any override of the experiment]

Installed, the same is called evr1-preprocess.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.lengths import histogram, prompt_lengths
from datamodules.preprocess import check_space, plan_work, record, run_local, run_ray
from datamodules.video.maintenance import clear_stale
from datamodules.video.quarantine import Quarantine
from datamodules.video_rl import VideoRLDataModule
from lightning_modules.launch.config import ConfigError, build_data, compose

OWN = ("workers", "launcher", "address", "dry_run", "retry_quarantined", "list_quarantined")


@dataclass(frozen=True)
class Options:
    """This script's own options; everything else on the command line is the experiment's."""

    workers: int | None = None
    """Processes (Ray tasks at a time); None = one per core, over Ray as many as the cluster has."""
    launcher: str = "local"
    address: str | None = None
    """Of a running Ray cluster; None = start one on this machine."""
    dry_run: bool = False
    retry_quarantined: bool = False
    list_quarantined: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0 also when single videos failed: they are listed)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        own, overrides = split(sys.argv[1:] if arguments is None else arguments)
        module = build_data(compose("train", overrides))
        return preprocess(module, own)
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def split(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Separate this script's own options from the experiment's overrides.

    Raises:
        ValueError: an option has a value that it cannot have.
    """
    own: dict[str, Any] = {}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in OWN:
            overrides.append(argument)
        elif key == "workers":
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"workers={value} must be a number of processes from 1")
            own[key] = int(value)
        elif key == "launcher":
            if value not in ("local", "ray"):
                raise ValueError(f"launcher={value} is unknown; use local or ray")
            own[key] = value
        elif key == "address":
            own[key] = value or None
        else:
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{key}={value} must be true or false")
            own[key] = value.lower() == "true"
    return Options(**own), overrides


def preprocess(module: VideoRLDataModule, own: Options) -> int:
    """Plan, say what will happen, and do it."""
    cache = module.cache
    if cache.folder is None or cache.quarantine is None:
        raise ValueError("data.cache_dir is not set (or data.source_mode=decode): there is nowhere to store clips")
    if own.list_quarantined:
        return list_quarantined(cache.quarantine)
    module.setup()
    samples = [*module.train_samples, *module.val_samples]
    if own.retry_quarantined:
        say(f"{cache.quarantine.clear()} quarantined videos are tried again")
    clear_stale(cache.folder)
    work = plan_work(samples, module.preparer)
    needed = work.estimated_bytes(cache.codec)
    free = check_space(cache, needed, work.cached_bytes)
    say(
        f"{work.num_references} video references, {len(work.jobs) + work.num_cached} readable clips, "
        f"{work.num_cached} cached, {len(work.jobs)} to decode, {len(work.failures)} samples with unreadable videos"
    )
    size = f"{needed / 1e9:.1f} GB" if needed >= 1e9 else f"{needed / 1e6:.1f} MB"
    say(f"about {size} as {cache.codec} in {cache.folder}; {free / 1e9:.1f} GB free")
    if own.dry_run:
        lengths = module.lengths or prompt_lengths(module.train_samples, module.preparer, cache.folder)
        say(histogram(lengths, module.options.max_prompt_tokens))
        for uid, tokens in module.dropped:
            say(f"dropped: {uid} ({tokens} tokens)")
        for failure in work.failures:
            say(f"unreadable: {failure.id} {failure.path}: {failure.reason}")
        return 0
    timeout = module.options.decode_timeout_s or 600.0
    if own.launcher == "ray":
        results = run_ray(work.jobs, cache, own.workers, timeout, own.address)
    else:
        results = run_local(work.jobs, cache, own.workers or len(os.sched_getaffinity(0)), timeout)
    began = time.monotonic()
    stored, num_bytes, failures = record(work, results, cache, say)
    say(f"stored {stored} clips, {num_bytes / 1e6:.1f} MB, in {time.monotonic() - began:.1f} s")
    if failures:
        say(f"{len(failures)} samples have videos that cannot be used, see {cache.folder / 'failures.jsonl'}")
    return 0


def list_quarantined(quarantine: Quarantine) -> int:
    """Print the media that are skipped, and why."""
    entries = quarantine.entries()
    say(f"{len(entries)} quarantined videos in {quarantine.path}")
    for entry in entries:
        say(f"{entry['name']}: {entry['reason']}")
    return 0


def say(text: str) -> None:
    """One line of what the command is asked for, on standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
