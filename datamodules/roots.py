"""Where the relative media paths of one annotation file start: under `media_root`, or beside the file itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from datamodules.types import MediaRef, Sample

logger = logging.getLogger(__name__)


def anchor(samples: list[Sample], file: str | Path, media_root: str | Path | None) -> list[Sample]:
    """Return the samples with media paths that later stages resolve correctly.

    One media root cannot serve a user's own training file and a held-out file that came with its media. The first
    relative path that exists in either place decides for the whole file, so that 100,000 records cost no look-ups:
    found under `media_root` = nothing changes; found beside the annotation file = the paths become absolute.
    """
    root = None if media_root is None else Path(media_root)
    beside = Path(file).resolve().parent
    refs = (ref for sample in samples for ref in (*sample.images, *sample.videos))
    for ref in (ref for ref in refs if not Path(ref.path).is_absolute()):
        if root is not None and (root / ref.path).exists():
            return samples
        if (beside / ref.path).exists():
            if root is not None and root.resolve() == beside:
                return samples
            logger.info("%s: media paths are relative to its own folder", file)
            return [_absolute(sample, beside) for sample in samples]
    return samples


def _absolute(sample: Sample, folder: Path) -> Sample:
    def moved(refs: tuple[MediaRef, ...]) -> tuple[MediaRef, ...]:
        return tuple(replace(r, path=str(folder / r.path)) if not Path(r.path).is_absolute() else r for r in refs)

    return replace(sample, images=moved(sample.images), videos=moved(sample.videos))
