"""Show what the model sees of videos: spec, indices, times, tokens, and a contact sheet.

python scripts/inspect_cache.py VIDEO [VIDEO ...] [out=FOLDER] [start=S] [end=S] [experiment=qwen3vl_8b data.fps=1 ...]

VIDEO is a video file, or a file of the cache (.clip). Without `experiment` the Qwen3-VL rules and the default limits
of conf/data/base.yaml are used.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.errors import MediaError
from datamodules.types import MediaRef
from datamodules.video.cache import SUFFIX, VideoCache
from datamodules.video.contact_sheet import contact_sheet, describe
from datamodules.video.entry import EntryError, plan_from, read_entry
from datamodules.video.spec import VideoSpec
from lightning_modules.launch.config import build_data, compose


def main(arguments: list[str]) -> int:
    """Inspect; returns 1 when a video cannot be used."""
    videos = [argument for argument in arguments if "=" not in argument]
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if not videos:
        print(__doc__)
        return 2
    out = Path(options.pop("out", "."))
    start, end = (float(options.pop(key)) if key in options else None for key in ("start", "end"))
    try:
        spec, cache = settings([f"{key}={value}" for key, value in options.items()])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for video in videos:
        try:
            inspect(video, spec, cache, MediaRef(video, start, end), out)
        except (MediaError, EntryError, FileNotFoundError) as error:
            print(f"{video}: cannot be used: {error}", file=sys.stderr)
            failed = 1
    return failed


def settings(overrides: list[str]) -> tuple[VideoSpec, VideoCache]:
    """Spec and cache of an experiment, or the defaults."""
    if not any(override.startswith("experiment=") for override in overrides):
        values = {
            override.removeprefix("data.").partition("=")[0]: override.partition("=")[2] for override in overrides
        }
        known = {"fps": float, "max_frames": int, "min_frames": int, "max_pixels": int, "min_pixels": int}
        fields = {key.removeprefix("video_"): value for key, value in values.items()}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown keys {unknown}; known without an experiment: {', '.join(known)}")
        chosen = {"max_frames": 128, "max_pixels": 262144, **{key: known[key](value) for key, value in fields.items()}}
        return VideoSpec(**chosen), VideoCache(None)

    module = build_data(compose("train", overrides))
    return module.preparer.video_spec, module.cache


def inspect(video: str, spec: VideoSpec, cache: VideoCache, ref: MediaRef, out: Path) -> None:
    """Print one video's facts and write its contact sheet."""
    print(f"== {video}")
    if video.endswith(SUFFIX):
        frames, header = read_entry(Path(video))
        plan = plan_from(header.plan)
        print(f"cached      {header.codec}, {Path(video).stat().st_size / 1e6:.2f} MB, made with {header.producer}")
        print(f"key         {header.key}")
    else:
        plan = cache.plan(ref, spec)
        cached = cache.has(ref, spec)
        where = f" {cache.entry_path(ref, spec)}" if cache.folder is not None else ""
        print(f"cached      {'yes' if cached else 'no'}{where}")
        print(f"spec        {spec.fingerprint()} ({spec.digest})")
        frames = cache.load(ref, spec).frames
    print(describe(plan))
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{Path(video).stem}.png"
    contact_sheet(frames, plan).save(picture)
    print(f"sheet       {picture}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
