"""Exact prompt lengths from metadata: no frame is decoded, no pixel processed.

The number of visual tokens follows from the container's metadata and the spec; text is tokenised as the processor
would. Results are remembered on disk, keyed by everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.common.files import write_json
from datamodules.images import image_size
from datamodules.prepare import expand, image_run, video_run
from datamodules.video.artifacts import SUFFIX as ARTIFACT_SUFFIX
from datamodules.video.probe import probe

if TYPE_CHECKING:
    from datamodules.prepare import SamplePreparer
    from datamodules.types import Sample
    from datamodules.video.spec import VideoInfo

logger = logging.getLogger(__name__)

MediaKey = tuple[str, str]
"""("image" | "video", path)"""


@dataclass(frozen=True)
class Length:
    """How long a sample's prompt will be."""

    uid: str
    tokens: int | None
    """Prompt tokens including visual ones; None when a medium cannot be read or the text does not fit."""
    reason: str = ""
    """Why `tokens` is None."""


def prompt_length(sample: Sample, preparer: SamplePreparer) -> int:
    """Tokens of the prompt that `preparer.prepare(sample)` would build.

    Raises:
        ValueError: a medium cannot be read, or the text does not fit the media.
    """
    rules = preparer.rules
    images = [preparer.image_spec.grid(*image_size(preparer.cache.source(ref))) for ref in sample.images]
    videos = []
    for ref in sample.videos:
        plan = preparer.cache.plan(ref, preparer.spec_for(ref))
        videos.append(video_run(plan.grid, plan.indices, plan.fps, rules))
    text = preparer.prompt_text(sample)
    runs = [image_run(grid, rules) for grid in images]
    return len(expand(text, runs, videos, rules, preparer.processor.tokenizer))


def prompt_lengths(
    samples: Sequence[Sample], preparer: SamplePreparer, cache_dir: str | Path | None = None, threads: int | None = None
) -> list[Length]:
    """Lengths of many samples; each medium is probed once, in parallel.

    Args:
        samples: what to measure.
        preparer: defines spec, templates and tokenizer.
        cache_dir: folder for remembered results; None = none.
        threads: probing threads; None = one per CPU, 16 at most.
    """
    file = None
    if cache_dir is not None:
        file = Path(cache_dir) / "lengths" / f"{_key(samples, preparer)}.json"
        try:
            return [Length(**fields) for fields in json.loads(file.read_text())]
        except FileNotFoundError:
            pass
        except (ValueError, TypeError) as error:
            logger.warning("remembered prompt lengths %s are damaged (%s); measuring again", file, error)
    _probe_all(samples, preparer, threads or min(16, os.cpu_count() or 1))
    lengths = []
    for sample in samples:
        try:
            lengths.append(Length(sample.uid, prompt_length(sample, preparer)))
        except ValueError as error:
            # Met again, and listed, when the sample's turn comes; here it only has no length.
            lengths.append(Length(sample.uid, None, str(error)))
    if file is not None:
        try:
            write_json(file, [asdict(length) for length in lengths], indent=None)
        except OSError as error:
            logger.warning("cannot remember prompt lengths in %s (%s)", file, error)
    return lengths


def overlong(lengths: Sequence[Length], limit: int) -> list[tuple[str, int]]:
    """(uid, tokens) of the samples whose prompt is longer than `limit`."""
    return [(length.uid, length.tokens) for length in lengths if length.tokens is not None and length.tokens > limit]


def histogram(lengths: Sequence[Length], limit: int | None = None, bins: int = 12, width: int = 40) -> str:
    """A text histogram of token lengths, with what is unreadable and what exceeds `limit`."""
    tokens = sorted(length.tokens for length in lengths if length.tokens is not None)
    unread = len(lengths) - len(tokens)
    lines = [f"{len(tokens)} prompts measured, {unread} unreadable"]
    if tokens:
        lines[0] += f"; tokens min {tokens[0]}, median {tokens[len(tokens) // 2]}, max {tokens[-1]}, sum {sum(tokens)}"
        step = max(1, -(-(tokens[-1] - tokens[0] + 1) // bins))
        counts = [0] * bins
        for value in tokens:
            counts[(value - tokens[0]) // step] += 1
        for i, count in enumerate(counts):
            low = tokens[0] + i * step
            if low <= tokens[-1]:
                lines.append(f"{low:>8}-{low + step - 1:<8} {count:>7} {'#' * round(width * count / max(counts))}")
    if limit is not None:
        lines.append(f"{len(overlong(lengths, limit))} prompts exceed {limit} tokens and are dropped")
    return "\n".join(lines)


def _probe_all(samples: Sequence[Sample], preparer: SamplePreparer, threads: int) -> None:
    """Fill the probe's memory in parallel; probing waits for files and for FFmpeg, not for Python."""
    paths = sorted({preparer.cache.source(ref) for sample in samples for ref in sample.videos})
    paths = [path for path in paths if path.suffix != ARTIFACT_SUFFIX]

    def visit(path: Path) -> VideoInfo | None:
        try:
            return probe(path)
        except ValueError:
            return None

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(visit, paths))


def _key(samples: Sequence[Sample], preparer: SamplePreparer) -> str:
    """Digest of all inputs: records, media state, spec, templates, chat template, tokenizer."""
    state = hashlib.sha256()

    def add(value: object) -> None:
        state.update(json.dumps(value, sort_keys=True, default=str).encode())

    processor = preparer.processor
    add(["v1", preparer.video_spec.fingerprint(), asdict(preparer.image_spec), asdict(preparer.rules)])
    add([preparer.templates.sources(), processor.chat_template, processor.tokenizer.chat_template])
    backend = getattr(processor.tokenizer, "backend_tokenizer", None)
    add(backend.to_str() if backend is not None else sorted(processor.tokenizer.get_vocab().items()))
    seen: dict[Path, object] = {}
    for sample in samples:
        add(asdict(sample))
        for ref in (*sample.images, *sample.videos):
            path = preparer.cache.source(ref)
            if path in seen:
                continue
            try:
                state_of = path.stat()
                seen[path] = [state_of.st_size, state_of.st_mtime_ns]
            except OSError:
                seen[path] = None
    add([[str(path), value] for path, value in seen.items()])
    return state.hexdigest()[:32]
