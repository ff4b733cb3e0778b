"""Time and peak memory of forward + backward per layout, as JSON.

    python scripts/bench/layouts.py --visual-tokens 500 2000 --responses 4 8 --length 64

A video of random pixels gives the asked number of visual tokens; every layout trains on the same group. Times are
whole-model (vision tower, language model, log-probs) and without building the pixels; each layout runs in its own
process, so that peak memory is its own. CPU seconds are the ones to compare on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYOUTS = {
    "padded": "lightning_modules.layouts.padded.PaddedLayout",
    "packed": "lightning_modules.layouts.packed.PackedLayout",
    "shared_prefix": "lightning_modules.layouts.shared_prefix.SharedPrefixLayout",
}


def bench_model(folder: Path, hidden: int, layers: int) -> Path:
    """A random Qwen3-VL whose width makes arithmetic, not overhead, the cost."""
    from transformers import Qwen3VLForConditionalGeneration

    from datamodules.demo.tiny_model import build_tiny_model, tiny_config

    base = build_tiny_model(folder / "tiny", ["What is shown? <answer>A</answer>"] * 8)
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base)
    config = tiny_config(processor.tokenizer)
    config.text_config.hidden_size = config.vision_config.out_hidden_size = hidden
    config.text_config.intermediate_size = 3 * hidden
    config.text_config.num_hidden_layers = layers
    config.vision_config.hidden_size = hidden // 2
    config.vision_config.intermediate_size = 2 * hidden
    config.vision_config.depth = max(2, layers // 2)
    config.vision_config.deepstack_visual_indexes = [0, 1]
    target = folder / "model"
    Qwen3VLForConditionalGeneration(config).save_pretrained(target)
    processor.save_pretrained(target)
    return target


def group_of(model: Path, visual_tokens: int, responses: int, length: int) -> Any:
    """One rollout group on a video of about `visual_tokens` tokens."""
    import numpy as np
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    from datamodules.types import PreparedSample, PreparedVideo, Sample
    from rollout.types import Response, RolloutGroup

    rng = np.random.default_rng(0)
    side, per_patch = 256, (256 // 32) ** 2
    frames = 2 * max(1, round(visual_tokens / per_patch))
    clip = rng.integers(0, 256, (frames, 3, side, side), dtype=np.uint8)
    metadata = VideoMetadata(total_num_frames=frames, fps=2.0, frames_indices=list(range(frames)), duration=frames / 2)
    processor = AutoProcessor.from_pretrained(model)
    content = [{"type": "video"}, {"type": "text", "text": "What is shown?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    out = processor(
        text=[text],
        videos=[clip],
        video_metadata=[metadata],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    grid = tuple(out["video_grid_thw"][0].tolist())
    prompt = PreparedSample(
        sample=Sample(uid="bench", problem="", answer="", problem_type="", data_type="video"),
        prompt_text=text,
        prompt_ids=(),
        expanded_ids=tuple(out["input_ids"][0].tolist()),
        videos=(PreparedVideo(clip, metadata, grid, ""),),
    )
    answers = tuple(
        Response(rng.integers(20, 250, length).astype(np.int32), np.zeros(length, np.float32), "stop", "", k)
        for k in range(responses)
    )
    return RolloutGroup(index=0, prompt=prompt, responses=answers)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of one layout; medians over the repeats."""
    import torch

    from lightning_modules.families.policy import PolicyModel
    from lightning_modules.families.qwen3_vl import Qwen3VLFamily
    from lightning_modules.layouts.base import Context
    from lightning_modules.layouts.patchify import Patchifier
    from scripts.bench.peak import peak_since, start_peak

    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    family = Qwen3VLFamily().open(arguments.model)
    policy = PolicyModel(family.load(arguments.model, torch.float32), family).to(device)
    responses = arguments.responses[0]
    group = group_of(Path(arguments.model), arguments.visual_tokens[0], responses, arguments.length)
    module, name = LAYOUTS[arguments.layout].rsplit(".", 1)
    layout = getattr(__import__(module, fromlist=[name]), name)()
    context = Context(family, Patchifier.from_path(arguments.model), device)
    pieces = layout.pieces([group], [(0, range(responses))], 10**9)
    batch = layout.collate(pieces, context)
    before = start_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    times, cpu_times = [], []
    for _ in range(arguments.repeats + 1):
        policy.zero_grad()
        start, cpu = time.perf_counter(), time.process_time()
        out = policy(batch)
        out.logprobs.mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu)
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    peak = torch.cuda.max_memory_allocated() / 2**20 - before if device.type == "cuda" else peak_since(before)
    return {
        "layout": arguments.layout,
        "prompt_tokens": len(group.prompt.expanded_ids),
        "row_tokens": int(batch.input_ids.numel()),
        "seconds": min(times[1:]),
        "cpu_seconds": min(cpu_times[1:]),
        "all_seconds": times,
        "peak_mb": peak,
        "loss": float(out.logprobs.mean()),
        "grad_norm": float(norm),
    }


def sweep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every layout at every prompt length, one process each, with ratios to the fastest layout without sharing."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(bench_model(Path(folder), arguments.hidden, arguments.layers))
        for tokens, responses in itertools.product(arguments.visual_tokens, arguments.responses):
            rows = {}
            for layout in arguments.layouts:
                command = [sys.executable, __file__, "--one", "--layout", layout, "--model", model]
                command += ["--visual-tokens", str(tokens), "--responses", str(responses)]
                command += ["--length", str(arguments.length), "--repeats", str(arguments.repeats)]
                command += ["--threads", str(arguments.threads), "--device", arguments.device]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows[layout] = json.loads(output.splitlines()[-1])
            entry: dict[str, Any] = {
                "visual_tokens": tokens,
                "responses": responses,
                "length": arguments.length,
            }
            entry["layouts"] = rows
            others = [row for name, row in rows.items() if name != "shared_prefix"]
            if "shared_prefix" in rows and others:
                shared = rows["shared_prefix"]
                entry["speedup"] = min(row["seconds"] for row in others) / shared["seconds"]
                entry["cpu_speedup"] = min(row["cpu_seconds"] for row in others) / max(shared["cpu_seconds"], 1e-9)
                entry["memory_ratio"] = min(row["peak_mb"] for row in others) / max(shared["peak_mb"], 1.0)
            results.append(entry)
    return results


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visual-tokens", type=int, nargs="+", default=[2000])
    parser.add_argument("--responses", type=int, nargs="+", default=[8], help="group sizes")
    parser.add_argument("--length", type=int, default=64, help="tokens of each response")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=None, help="a Hugging Face folder; default: a random model")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--layout", choices=list(LAYOUTS), default="padded", help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Print one JSON document."""
    arguments = parse()
    print(json.dumps(measure(arguments) if arguments.one else sweep(arguments)))


if __name__ == "__main__":
    main()
