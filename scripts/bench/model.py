"""Time and peak memory of forward + backward, as one JSON document; every variant runs in a process of its own.

    python scripts/bench/model.py layouts --visual-tokens 500 2000 --responses 4 8 --length 64
    python scripts/bench/model.py logprobs --vocab 151936 --tokens 512 --chunks 64 256

`layouts`: the whole model (vision tower, language model, log-probs) on one group about a video of random pixels,
without building the pixels. `logprobs`: the full [tokens, vocab] matrix (chunk 0) against chunks; memory is above the
inputs. CPU seconds are the ones to compare on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from transformers.video_utils import VideoMetadata

from datamodules.demo.tiny_model import build_tiny_model, tiny_config
from datamodules.types import PreparedSample, PreparedVideo, Sample
from lightning_modules.core.logprobs import token_logprobs
from lightning_modules.families.policy import PolicyModel
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from lightning_modules.layouts.base import Context, Layout
from lightning_modules.layouts.packed import PackedLayout
from lightning_modules.layouts.padded import PaddedLayout
from lightning_modules.layouts.patchify import Patchifier
from lightning_modules.layouts.shared_prefix import SharedPrefixLayout
from rollout.types import Response, RolloutGroup

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "padded": PaddedLayout,
    "packed": PackedLayout,
    "shared_prefix": SharedPrefixLayout,
}


def bench_model(folder: Path, hidden: int, layers: int) -> Path:
    """A random Qwen3-VL whose width makes arithmetic, not overhead, the cost."""
    processor = AutoProcessor.from_pretrained(build_tiny_model(folder, ["What is shown? <answer>A</answer>"] * 8))
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


def group_of(model: Path, visual_tokens: int, responses: int, length: int) -> RolloutGroup:
    """One rollout group on a video of about `visual_tokens` tokens."""
    rng = np.random.default_rng(0)
    side, per_patch = 256, (256 // 32) ** 2
    frames = 2 * max(1, round(visual_tokens / per_patch))
    clip = rng.integers(0, 256, (frames, 3, side, side), dtype=np.uint8)
    metadata = VideoMetadata(total_num_frames=frames, fps=2.0, frames_indices=list(range(frames)), duration=frames / 2)
    processor = AutoProcessor.from_pretrained(model)
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is shown?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    out = processor(
        text=[text],
        videos=[clip],
        video_metadata=[metadata],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    prompt = PreparedSample(
        sample=Sample(uid="bench", problem="", answer="", problem_type="", data_type="video"),
        prompt_text=text,
        prompt_ids=(),
        expanded_ids=tuple(out["input_ids"][0].tolist()),
        videos=(PreparedVideo(clip, metadata, tuple(out["video_grid_thw"][0].tolist()), ""),),
    )
    answers = tuple(
        Response(rng.integers(20, 250, length).astype(np.int32), np.zeros(length, np.float32), "stop", "", k)
        for k in range(responses)
    )
    return RolloutGroup(index=0, prompt=prompt, responses=answers)


def resident(key: str) -> float:
    """`VmRSS` or `VmHWM` of this process on Linux, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


def start_peak() -> float:
    """Forget earlier peaks (imports, loading); returns the resident memory now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure_layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward with one layout; the best of the repeats."""
    device = torch.device(arguments.device)
    family = Qwen3VLFamily().open(arguments.model)
    policy = PolicyModel(family.load(arguments.model, torch.float32), family).to(device)
    responses = arguments.responses[0]
    group = group_of(Path(arguments.model), arguments.visual_tokens[0], responses, arguments.length)
    layout = LAYOUTS[arguments.one]()
    context = Context(family, Patchifier.from_path(arguments.model), device)
    batch = layout.collate(layout.pieces([group], [(0, range(responses))], 10**9), context)
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
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else resident("VmHWM")
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    return {
        "layout": arguments.one,
        "prompt_tokens": len(group.prompt.expanded_ids),
        "row_tokens": int(batch.input_ids.numel()),
        "seconds": min(times[1:]),
        "cpu_seconds": min(cpu_times[1:]),
        "all_seconds": times,
        "peak_mb": peak - before,
        "loss": float(out.logprobs.mean()),
        "grad_norm": float(norm),
    }


def measure_logprobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward with one chunk size; 0 is the plain way: all logits, log-softmax, gather."""
    chunk, generator = int(arguments.one), torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.dim, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(arguments.vocab, arguments.dim, generator=generator)).requires_grad_()
    targets = torch.randint(0, arguments.vocab, (arguments.tokens,), generator=generator)
    gradient = hidden.grad = torch.zeros_like(hidden)
    weight.grad = torch.zeros_like(weight)
    before = start_peak()
    start, cpu = time.perf_counter(), time.process_time()
    if chunk:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_size=chunk, with_entropy=arguments.entropy)
    else:
        logprobs = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    logprobs.mean().backward()
    return {
        "chunk": chunk,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": resident("VmHWM") - before,
        "loss": float(logprobs.detach().mean()),
        "grad_norm": float(gradient.norm()),
    }


def alone(variant: object, *overrides: object) -> dict[str, Any]:
    """This command line with some options replaced, for one variant in a process of its own."""
    command = [sys.executable, *sys.argv, "--one", str(variant), *map(str, overrides)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def sweep_layouts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every layout at every prompt length, with ratios to the fastest layout without sharing."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or bench_model(Path(folder), arguments.hidden, arguments.layers)
        for tokens, responses in itertools.product(arguments.visual_tokens, arguments.responses):
            own = ("--model", model, "--visual-tokens", tokens, "--responses", responses)
            rows = {layout: alone(layout, *own) for layout in arguments.layouts}
            entry: dict[str, Any] = {"visual_tokens": tokens, "responses": responses, "length": arguments.length}
            entry["layouts"] = rows
            others = [row for name, row in rows.items() if name != "shared_prefix"]
            if "shared_prefix" in rows and others:
                shared = rows["shared_prefix"]
                entry["speedup"] = min(row["seconds"] for row in others) / shared["seconds"]
                entry["cpu_speedup"] = min(row["cpu_seconds"] for row in others) / max(shared["cpu_seconds"], 1e-9)
                entry["memory_ratio"] = min(row["peak_mb"] for row in others) / max(shared["peak_mb"], 1.0)
            results.append(entry)
    return results


def sweep_logprobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The full matrix and every chunk size."""
    rows = [alone(chunk) for chunk in (0, *arguments.chunks)]
    settings = {name: getattr(arguments, name) for name in ("vocab", "tokens", "dim", "threads", "entropy")}
    best = min(row["peak_mb"] for row in rows[1:])
    return {**settings, "variants": rows, "memory_ratio": rows[0]["peak_mb"] / max(best, 1.0)}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(dest="case", required=True)
    layouts, logprobs = cases.add_parser("layouts"), cases.add_parser("logprobs")
    for case in (layouts, logprobs):
        case.add_argument("--threads", type=int, default=2)
        case.add_argument("--one", help=argparse.SUPPRESS)
    layouts.add_argument("--visual-tokens", type=int, nargs="+", default=[2000])
    layouts.add_argument("--responses", type=int, nargs="+", default=[8], help="group sizes")
    layouts.add_argument("--length", type=int, default=64, help="tokens of each response")
    layouts.add_argument("--repeats", type=int, default=2)
    layouts.add_argument("--hidden", type=int, default=128)
    layouts.add_argument("--layers", type=int, default=4)
    layouts.add_argument("--device", default="cpu")
    layouts.add_argument("--model", help="a Hugging Face folder; default: a random model")
    layouts.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    logprobs.add_argument("--vocab", type=int, default=151936)
    logprobs.add_argument("--tokens", type=int, default=512)
    logprobs.add_argument("--dim", type=int, default=64)
    logprobs.add_argument("--chunks", type=int, nargs="+", default=[64, 256])
    logprobs.add_argument("--entropy", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print one JSON document."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    measure, sweep = (
        (measure_layout, sweep_layouts) if arguments.case == "layouts" else (measure_logprobs, sweep_logprobs)
    )
    print(json.dumps(sweep(arguments) if arguments.one is None else measure(arguments)))


if __name__ == "__main__":
    main()
