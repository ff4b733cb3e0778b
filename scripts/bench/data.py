"""Speed and size of the data stage on real clips, looped to ten minutes by copying their packets; JSON lines.

    python scripts/bench/data.py cache    the cache's codecs against the float32 `.pt` files of the reference
    python scripts/bench/data.py decode   the decoders, against qwen-vl-utils
    python scripts/bench/data.py lengths  exact prompt lengths of 3,500 video samples without decoding

2 fps, 256 frames; loads are verified and every frame byte is read. `cold` = after the kernel was asked to drop the file
from its page cache. `--small` = one clip of 20 seconds and 32 frames, or 70 samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import av
import numpy as np
import torch

from datamodules.demo.synthetic import encode_video, synthetic_corpus
from datamodules.demo.tiny_model import build_tiny_model
from datamodules.errors import MediaError
from datamodules.lengths import prompt_lengths
from datamodules.prepare import SamplePreparer, load_processor
from datamodules.prompts import PromptTemplates
from datamodules.types import MediaRef, Sample
from datamodules.video import probe
from datamodules.video.cache import VideoCache
from datamodules.video.codecs import CODECS
from datamodules.video.decode import check_decoder, decode_spec
from datamodules.video.entry import read_entry, write_entry
from datamodules.video.spec import ImageSpec, VideoPlan, VideoSpec
from lightning_modules.families.qwen3_vl import Qwen3VLFamily

CLIPS = ("0F7LW.mp4", "5INX3.mp4", "JYUqV-7BPWE.mp4", "stvg_8670554760.mp4", "svg_3843663025.mp4")
"""The five 8-bit mp4 clips of the test data."""


def source_clips(small: bool, drawn: Path) -> list[Path]:
    """The test data's clips; with `small` and no test data, one that is drawn to `drawn`."""
    folder = Path(os.environ.get("EVR1_TEST_DATA", "")) / "videos"
    if (folder / CLIPS[0]).is_file():
        return [folder / name for name in (CLIPS[:1] if small else CLIPS)]
    if not small:
        sys.exit("EVR1_TEST_DATA does not name the folder of test data (videos/)")
    rows = np.arange(240)[None, :, None, None] + np.arange(90)[:, None, None, None]
    encode_video(drawn, np.broadcast_to(rows * 3 % 256, (90, 240, 320, 3)).astype(np.uint8), 15)
    return [drawn]


def looped(clip: Path, folder: Path, seconds: float) -> Path:
    """Repeat a clip's packets (no new encoding) until it lasts `seconds`."""
    target = folder / f"{clip.stem}_{seconds:g}s.mp4"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part.mp4")
    with av.open(str(clip)) as source, av.open(str(unfinished), "w") as sink:
        stream = source.streams.video[0]
        packets = [p for p in source.demux(stream) if p.size and p.pts is not None and p.dts is not None]
        times = [(p.pts or 0, p.dts or 0, p.duration or 0) for p in packets]
        span = max(pts for pts, _, _ in times) - min(pts for pts, _, _ in times) + times[0][2]
        output = sink.add_stream_from_template(stream)
        for turn in range(int(seconds / float(span * (stream.time_base or 1))) + 1):
            for original, (pts, dts, duration) in zip(packets, times, strict=True):
                packet = av.Packet(bytes(original))
                packet.pts, packet.dts, packet.duration = pts + turn * span, dts + turn * span, duration
                packet.time_base, packet.stream = original.time_base, output
                packet.is_keyframe = original.is_keyframe
                sink.mux(packet)
    unfinished.replace(target)
    return target


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def emit(**fields: object) -> None:
    """One JSON line."""
    print(json.dumps({key: round(v, 5) if isinstance(v, float) else v for key, v in fields.items()}), flush=True)


def bench_cache(clips: list[Path], folder: Path, small: bool) -> None:
    """Measure every clip and codec, then worst and median."""
    rows: list[dict[str, Any]] = []
    for clip in clips:
        path = looped(clip, folder, 20 if small else 600)
        frames, plan = decode_spec(path, VideoSpec(fps=2, max_frames=32 if small else 256))
        rows += codec_rows(clip.stem, frames, plan, folder, 1 if small else 5)
    for codec in CODECS:
        own = [row for row in rows if row["codec"] == codec]
        summary: dict[str, Any] = {"case": "summary", "codec": codec, "lossy": own[0]["lossy"]}
        for key in ("size_ratio", "speedup_warm", "speedup_cold"):
            values = [row[key] for row in own]
            summary |= {f"worst_{key}": max(values) if key == "size_ratio" else min(values)}
            summary |= {f"median_{key}": statistics.median(values)}
        emit(**summary)


def codec_rows(name: str, frames: np.ndarray, plan: VideoPlan, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Write and load one clip with every codec; the loaders take turns, so that other load meets all of them."""
    files = {codec: folder / f"{codec}.clip" for codec in ("float", *CODECS)}
    torch.save({"frames": torch.from_numpy(frames).float(), "metadata": {}}, files["float"])
    written = {c: timed(partial(write_entry, files[c], frames, plan, {}, c, {})) for c in CODECS}
    loads = {c: partial(load_float if c == "float" else load_entry, file) for c, file in files.items()}
    cold, warm = dict.fromkeys(files, math.inf), dict.fromkeys(files, math.inf)
    for _ in range(repeats):
        for codec, load in loads.items():
            with files[codec].open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cold[codec] = min(timed(load), cold[codec])
            warm[codec] = min(timed(load), warm[codec])
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
    for path in files.values():
        path.unlink()
    return rows


def load_float(file: Path) -> None:
    """Load and read every value of a float32 `.pt` file."""
    torch.load(file, weights_only=True)["frames"].sum()


def load_entry(file: Path) -> None:
    """Load, verify and read every byte of a cache file."""
    flat = np.asarray(read_entry(file)[0]).reshape(-1)
    np.add.reduce(flat.view(np.uint64 if flat.size % 8 == 0 else np.uint8))


def bench_decode(clips: list[Path], folder: Path, small: bool) -> None:
    """Decode every clip with every decoder that loads here, and with the peer."""
    max_frames = 32 if small else 256
    for path in [looped(clip, folder, 20 if small else 600) for clip in clips]:
        decode_spec(path, VideoSpec(min_frames=2, max_frames=2))  # imports, and the file into the page cache
        probe_s = timed(partial(probe._scan.__wrapped__, str(path), 0, 0))  # whatever was remembered
        pyav = decode_spec(path, VideoSpec(fps=2, max_frames=max_frames))[0].astype(np.int16)
        for decoder in ("pyav", "torchcodec", "decord"):
            began = time.perf_counter()
            try:
                check_decoder(decoder)
                frames, plan = decode_spec(path, VideoSpec(fps=2, max_frames=max_frames, decoder=decoder))
            except (RuntimeError, MediaError) as error:
                emit(case=path.stem, decoder=decoder, error=str(error).splitlines()[0])
                continue
            emit(
                case=path.stem,
                decoder=decoder,
                seconds=time.perf_counter() - began,
                probe_s=probe_s,
                frames=plan.num_frames,
                source_frames=plan.num_source_frames,
                largest_difference_to_pyav=int(np.abs(frames.astype(np.int16) - pyav).max()),
            )
        peer(path, max_frames, pyav)


def peer(path: Path, max_frames: int, pyav: np.ndarray) -> None:
    """The same clip through qwen-vl-utils with decord, where it is installed."""
    os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
    try:
        from qwen_vl_utils import vision_process
    except ImportError:
        return
    began = time.perf_counter()
    video = vision_process.fetch_video({"video": str(path), "fps": 2.0, "max_frames": max_frames}, image_patch_size=16)
    emit(
        case=path.stem,
        decoder="qwen-vl-utils (decord)",
        seconds=time.perf_counter() - began,
        largest_difference_to_pyav=float(np.abs(video.numpy() - pyav.astype(np.float32)).max()),
    )


def bench_lengths(clips: list[Path], folder: Path, small: bool) -> None:
    """Every sample has a file of its own (hard copies), as in a real data set."""
    model = build_tiny_model(folder / "model", synthetic_corpus())
    processor = load_processor(model)
    rules = Qwen3VLFamily().open(str(model)).media_spec(processor)
    spec = VideoSpec.for_rules(rules, max_frames=128, max_pixels=262144)
    cache = VideoCache(folder / "cache", folder)
    preparer = SamplePreparer(processor, rules, spec, ImageSpec.for_rules(rules), cache, PromptTemplates())
    samples = []
    for i in range(70 if small else 3500):
        shutil.copy(clips[i % len(clips)], folder / f"{i}.mp4")
        question = f"What happens first in part {i}?"
        samples.append(Sample(str(i), question, "x", "open-ended", "video", videos=(MediaRef(f"{i}.mp4"),)))
    for case in ("first", "remembered"):
        began = time.perf_counter()
        lengths = prompt_lengths(samples, preparer, folder / "lengths")
        tokens = [length.tokens or 0 for length in lengths]
        emit(case=case, samples=len(samples), seconds=time.perf_counter() - began, tokens=sum(tokens))
    exact = [preparer.prepare(sample).num_prompt_tokens for sample in samples[: len(clips)]]
    emit(case="exact", equal=exact == tokens[: len(clips)], checked=len(exact))


CASES = {"cache": bench_cache, "decode": bench_decode, "lengths": bench_lengths}


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--small", action="store_true", help="one short clip")
    parser.add_argument("--clip", type=int, help="only the clip of this number (0 to 4)")
    parser.add_argument("--folder", type=Path, help="where clips and entries lie (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        clips = source_clips(options.small, Path(temporary) / "drawn.mp4")
        CASES[options.case](clips if options.clip is None else [clips[options.clip]], folder, options.small)


if __name__ == "__main__":
    main()
