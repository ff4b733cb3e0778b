"""Size and speed of the cache's codecs against the float32 `.pt` files of the reference; one JSON line per case.

python scripts/bench/cache.py [--small] [--folder DIR]

Recipe: each clip looped to 10 minutes, 2 fps, 256 frames; loads are verified and every frame byte is read. `cold` =
after the kernel was asked to drop the file from its page cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clips import best_of, drop_page_cache, emit, looped, source_clips


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one clip, 20 seconds, 32 frames")
    parser.add_argument("--folder", help="where the looped clips and entries lie (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(options.folder or temporary), options.small)


def run(folder: Path, small: bool) -> None:
    """Measure every clip and codec, then worst and median."""
    from datamodules.video.decode import decode_spec
    from datamodules.video.spec import VideoSpec

    rows = []
    for clip in source_clips(small):
        path = looped(clip, folder, 20 if small else 600)
        frames, plan = decode_spec(path, VideoSpec(fps=2, max_frames=32 if small else 256))
        rows += measure(clip.stem, frames, plan, folder, 1 if small else 3)
    for codec in ("raw", "lossless", "jpeg"):
        own = [row for row in rows if row["codec"] == codec]
        summary = {"case": "summary", "codec": codec, "lossy": own[0]["lossy"]}
        for key, worst in (("size_ratio", max), ("speedup_warm", min), ("speedup_cold", min)):
            values = [row[key] for row in own]
            summary |= {f"worst_{key}": worst(values), f"median_{key}": statistics.median(values)}
        emit(**summary)


def measure(name: str, frames: object, plan: object, folder: Path, repeats: int) -> list[dict]:
    """Write and load one clip with every codec."""
    import numpy as np
    import torch

    from datamodules.video.codecs import CODECS
    from datamodules.video.entry import read_entry, write_entry

    float_file = folder / "float.pt"
    torch.save({"frames": torch.from_numpy(frames).float(), "metadata": {}}, float_file)
    float_bytes = float_file.stat().st_size

    def load_float() -> None:
        torch.load(float_file, weights_only=True)["frames"].sum()

    float_times = timed(load_float, float_file, repeats)
    rows = []
    for codec in CODECS:
        file = folder / f"{codec}.clip"
        seconds = best_of(lambda file=file, codec=codec: write_entry(file, frames, plan, {}, codec, {}), 1)

        def load(file: Path = file) -> None:
            np.add.reduce(
                np.asarray(read_entry(file)[0]).reshape(-1).view(np.uint64 if frames.size % 8 == 0 else np.uint8)
            )

        warm, cold = timed(load, file, repeats)
        loaded = np.asarray(read_entry(file)[0])
        row = {
            "case": name,
            "codec": codec,
            "lossy": CODECS[codec].lossy,
            "exact": bool(np.array_equal(loaded, frames)),
            "mean_error": float(np.abs(loaded[:8].astype(np.int16) - frames[:8]).mean()),
            "shape": list(frames.shape),
            "bytes": file.stat().st_size,
            "size_ratio": file.stat().st_size / float_bytes,
            "write_s": seconds,
            "warm_s": warm,
            "cold_s": cold,
            "float_warm_s": float_times[0],
            "float_cold_s": float_times[1],
            "speedup_warm": float_times[0] / warm,
            "speedup_cold": float_times[1] / cold,
        }
        emit(**row)
        rows.append(row)
        file.unlink()
    float_file.unlink()
    return rows


def timed(load: object, file: Path, repeats: int) -> tuple[float, float]:
    """(warm, cold) seconds."""

    def cold() -> float:
        drop_page_cache(file)
        return best_of(load, 1)

    from_disk = min(cold() for _ in range(repeats))
    load()
    return best_of(load, repeats), from_disk


if __name__ == "__main__":
    main()
