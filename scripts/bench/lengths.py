"""Seconds to find the exact prompt lengths of 3,500 video samples without decoding; one JSON line per case.

python scripts/bench/lengths.py [--small]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clips import emit, source_clips


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="70 samples on one clip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(temporary), source_clips(options.small), 70 if options.small else 3500)


def run(folder: Path, clips: list[Path], count: int) -> None:
    """Every sample has a file of its own (hard copies), as in a real data set."""
    import shutil

    from datamodules.demo.synthetic import synthetic_corpus
    from datamodules.demo.tiny_model import build_tiny_model
    from datamodules.lengths import prompt_lengths
    from datamodules.prepare import SamplePreparer, load_processor
    from datamodules.prompts import PromptTemplates
    from datamodules.types import MediaRef, Sample
    from datamodules.video.cache import VideoCache
    from datamodules.video.spec import ImageSpec, VideoSpec
    from lightning_modules.families.qwen3_vl import Qwen3VLFamily

    model = build_tiny_model(folder / "model", synthetic_corpus())
    processor = load_processor(model)
    rules = Qwen3VLFamily().open(str(model)).media_spec(processor)
    spec = VideoSpec.for_rules(rules, max_frames=128, max_pixels=262144)
    cache = VideoCache(folder / "cache", folder)
    preparer = SamplePreparer(processor, rules, spec, ImageSpec.for_rules(rules), cache, PromptTemplates())
    samples = []
    for i in range(count):
        name = f"{i}.mp4"
        shutil.copy(clips[i % len(clips)], folder / name)
        question = f"What happens first in part {i}?"
        samples.append(Sample(str(i), question, "x", "open-ended", "video", videos=(MediaRef(name),)))
    for case in ("first", "remembered"):
        began = time.perf_counter()
        lengths = prompt_lengths(samples, preparer, folder / "lengths")
        emit(
            case=case,
            samples=count,
            seconds=time.perf_counter() - began,
            tokens=sum(length.tokens for length in lengths),
        )
    exact = [preparer.prepare(sample).num_prompt_tokens for sample in samples[: len(clips)]]
    emit(case="exact", equal=exact == [length.tokens for length in lengths[: len(clips)]], checked=len(exact))


if __name__ == "__main__":
    main()
