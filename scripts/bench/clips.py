"""The fixed recipe of the video benchmarks: real clips looped to ten minutes by copying their packets."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CLIPS = ("0F7LW.mp4", "5INX3.mp4", "JYUqV-7BPWE.mp4", "stvg_8670554760.mp4", "svg_3843663025.mp4")
"""The five 8-bit mp4 clips of the test data."""


def source_clips(small: bool) -> list[Path]:
    """The test data's clips; with `small` and no test data, one drawn clip."""
    folder = Path(os.environ.get("EVR1_TEST_DATA", "")) / "videos"
    if (folder / CLIPS[0]).is_file():
        return [folder / name for name in (CLIPS[:1] if small else CLIPS)]
    if not small:
        sys.exit("EVR1_TEST_DATA does not name the folder of test data (videos/)")
    import numpy as np

    from datamodules.demo.synthetic import encode_video

    path = Path(os.environ.get("TMPDIR", "/tmp")) / "bench_drawn.mp4"
    rows = np.arange(240)[None, :, None, None] + np.arange(90)[:, None, None, None]
    frames = np.broadcast_to(rows * 3 % 256, (90, 240, 320, 3)).astype(np.uint8)
    encode_video(path, frames, 15)
    return [path]


def looped(clip: Path, folder: Path, seconds: float) -> Path:
    """Repeat a clip's packets (no new encoding) until it lasts `seconds`."""
    import av

    target = folder / f"{clip.stem}_{seconds:g}s.mp4"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part.mp4")
    with av.open(str(clip)) as source, av.open(str(partial), "w") as sink:
        stream = source.streams.video[0]
        packets = [(p.pts, p.dts, p.duration, bytes(p), p.is_keyframe) for p in source.demux(stream) if p.size]
        span = max(p[0] for p in packets) - min(p[0] for p in packets) + packets[0][2]
        output = sink.add_stream_from_template(stream)
        for turn in range(int(seconds / float(span * stream.time_base)) + 1):
            for pts, dts, duration, data, key in packets:
                packet = av.Packet(data)
                packet.pts, packet.dts, packet.duration = pts + turn * span, dts + turn * span, duration
                packet.time_base, packet.stream, packet.is_keyframe = stream.time_base, output, key
                sink.mux(packet)
    partial.replace(target)
    return target


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to forget a file, so that the next read comes from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def best_of(function: Callable[[], object], repeats: int) -> float:
    """Shortest of several runs, in seconds: the least disturbed one."""
    return min(timed(function) for _ in range(repeats))


def emit(**fields: object) -> None:
    """One JSON line."""
    print(json.dumps({key: round(v, 5) if isinstance(v, float) else v for key, v in fields.items()}), flush=True)
