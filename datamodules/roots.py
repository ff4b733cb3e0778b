"""Where the relative media paths of one annotation file start: under `media_root`, or beside the file itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from datamodules.types import Sample

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
            # An absolute path stays what it is: joining it to a folder gives the path alone.
            return [
                replace(
                    sample,
                    images=tuple(replace(ref, path=str(beside / ref.path)) for ref in sample.images),
                    videos=tuple(replace(ref, path=str(beside / ref.path)) for ref in sample.videos),
                )
                for sample in samples
            ]
    return samples
