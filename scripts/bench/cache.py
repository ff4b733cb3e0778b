"""Size and speed of the cache's codecs against the float32 `.pt` files of the reference; one JSON line per case.

python scripts/bench/cache.py [--small] [--clip N] [--folder DIR]

Recipe: each clip looped to 10 minutes, 2 fps, 256 frames; loads are verified and every frame byte is read. `cold` =
after the kernel was asked to drop the file from its page cache.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clips import drop_page_cache, emit, looped, source_clips, timed

if TYPE_CHECKING:
    import numpy as np


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one clip, 20 seconds, 32 frames")
    parser.add_argument("--clip", type=int, help="only the clip of this number (0 to 4)")
    parser.add_argument("--folder", help="where the looped clips and entries lie (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clips = source_clips(options.small)
        run(Path(options.folder or temporary), clips if options.clip is None else [clips[options.clip]], options.small)


def run(folder: Path, clips: list[Path], small: bool) -> None:
    """Measure every clip and codec, then worst and median."""
    from datamodules.video.decode import decode_spec
    from datamodules.video.spec import VideoSpec

    rows = []
    for clip in clips:
        path = looped(clip, folder, 20 if small else 600)
        frames, plan = decode_spec(path, VideoSpec(fps=2, max_frames=32 if small else 256))
        rows += measure(clip.stem, frames, plan, folder, 1 if small else 5)
    for codec in ("raw", "lossless", "jpeg"):
        own = [row for row in rows if row["codec"] == codec]
        summary = {"case": "summary", "codec": codec, "lossy": own[0]["lossy"]}
        for key, worst in (("size_ratio", max), ("speedup_warm", min), ("speedup_cold", min)):
            values = [row[key] for row in own]
            summary |= {f"worst_{key}": worst(values), f"median_{key}": statistics.median(values)}
        emit(**summary)


def measure(name: str, frames: np.ndarray, plan: object, folder: Path, repeats: int) -> list[dict]:
    """Write and load one clip with every codec."""
    import numpy as np
    import torch

    from datamodules.video.codecs import CODECS
    from datamodules.video.entry import read_entry, write_entry

    files = {codec: folder / f"{codec}.clip" for codec in ("float", *CODECS)}
    torch.save({"frames": torch.from_numpy(frames).float(), "metadata": {}}, files["float"])
    loads = {"float": partial(load_float, files["float"])}
    written = {}
    for codec in CODECS:
        written[codec] = timed(partial(write_entry, files[codec], frames, plan, {}, codec, {}))
        loads[codec] = partial(load_entry, files[codec])
    cold, warm = best_times(loads, files, repeats)
    rows = []
    for codec in CODECS:
        loaded = np.asarray(read_entry(files[codec])[0])
        row = {
            "case": name,
            "codec": codec,
            "lossy": CODECS[codec].lossy,
            "exact": bool(np.array_equal(loaded, frames)),
            "mean_error": float(np.abs(loaded[:8].astype(np.int16) - frames[:8]).mean()),
            "shape": list(frames.shape),
            "bytes": files[codec].stat().st_size,
            "size_ratio": files[codec].stat().st_size / files["float"].stat().st_size,
            "write_s": written[codec],
            "warm_s": warm[codec],
            "cold_s": cold[codec],
            "float_warm_s": warm["float"],
            "float_cold_s": cold["float"],
            "speedup_warm": warm["float"] / warm[codec],
            "speedup_cold": cold["float"] / cold[codec],
        }
        emit(**row)
        rows.append(row)
    for file in files.values():
        file.unlink()
    return rows


def load_float(file: Path) -> None:
    """Load and read every value of a float32 `.pt` file."""
    import torch

    torch.load(file, weights_only=True)["frames"].sum()


def load_entry(file: Path) -> None:
    """Load, verify and read every byte of a cache file."""
    import numpy as np

    from datamodules.video.entry import read_entry

    flat = np.asarray(read_entry(file)[0]).reshape(-1)
    np.add.reduce(flat.view(np.uint64 if flat.size % 8 == 0 else np.uint8))


def best_times(loads: dict, files: dict[str, Path], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Best (cold, warm) seconds of every loader; they take turns, so that other load meets all of them."""
    cold, warm = {}, {}
    for _ in range(repeats):
        for name, load in loads.items():
            drop_page_cache(files[name])
            cold[name] = min(timed(load), cold.get(name, math.inf))
            warm[name] = min(timed(load), warm.get(name, math.inf))
    return cold, warm


if __name__ == "__main__":
    main()
