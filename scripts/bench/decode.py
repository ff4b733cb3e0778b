"""Speed of the decoders on the fixed recipe, against qwen-vl-utils; one JSON line per case.

python scripts/bench/decode.py [--small] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clips import best_of, emit, looped, source_clips


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one clip, 20 seconds, 32 frames")
    parser.add_argument("--folder", help="where the looped clips lie (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for clip in source_clips(options.small):
            path = looped(clip, Path(options.folder or temporary), 20 if options.small else 600)
            measure(path, 32 if options.small else 256)


def measure(path: Path, max_frames: int) -> None:
    """Decode one clip with every decoder that loads here, and with the peer."""
    import numpy as np

    from datamodules.errors import MediaError
    from datamodules.video.decode import check_decoder, decode_spec
    from datamodules.video.spec import VideoSpec

    decode_spec(path, VideoSpec(min_frames=2, max_frames=2))  # imports, and the file into the page cache
    probe_s = best_of(lambda: uncached_probe(path), 1)
    results = {}
    for decoder in ("pyav", "torchcodec", "decord"):
        try:
            check_decoder(decoder)
            spec = VideoSpec(fps=2, max_frames=max_frames, decoder=decoder)
            seconds = best_of(lambda spec=spec: results.update({spec.decoder: decode_spec(path, spec)}), 1)
        except (RuntimeError, MediaError) as error:
            emit(case=path.stem, decoder=decoder, error=str(error).splitlines()[0])
            continue
        frames, plan = results[decoder]
        difference = int(np.abs(frames.astype(np.int16) - results["pyav"][0]).max())
        emit(
            case=path.stem,
            decoder=decoder,
            seconds=seconds,
            probe_s=probe_s,
            frames=plan.num_frames,
            source_frames=plan.num_source_frames,
            largest_difference_to_pyav=difference,
        )
    peer(path, max_frames, results["pyav"][0])


def uncached_probe(path: Path) -> None:
    """A pass over the packets, whatever was remembered."""
    from datamodules.video import probe

    probe._scan.__wrapped__(str(path), 0, 0)


def peer(path: Path, max_frames: int, ours: object) -> None:
    """The same clip through qwen-vl-utils with decord."""
    import numpy as np

    os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
    try:
        from qwen_vl_utils import vision_process
    except ImportError:
        return
    out = {}

    def call() -> None:
        element = {"video": str(path), "fps": 2.0, "max_frames": max_frames}
        out["video"] = vision_process.fetch_video(element, image_patch_size=16)

    seconds = best_of(call, 1)
    difference = float(np.abs(out["video"].numpy() - np.asarray(ours, dtype=np.float32)).max())
    emit(case=path.stem, decoder="qwen-vl-utils (decord)", seconds=seconds, largest_difference_to_pyav=difference)


if __name__ == "__main__":
    main()
