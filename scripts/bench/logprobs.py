"""Time and peak memory of log-probs: full [tokens, vocab] matrix against chunks, as JSON.

    python scripts/bench/logprobs.py --vocab 151936 --tokens 512 --chunks 64 256

Each variant runs in its own process, so that peak memory is its own; memory is above the inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def full_matrix(hidden: Any, weight: Any, targets: Any) -> Any:
    """The plain way: all logits, log-softmax, gather."""
    logp = (hidden @ weight.T).float().log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of one variant; chunk 0 is the full matrix."""
    import torch

    from lightning_modules.core.logprobs import token_logprobs
    from scripts.bench.peak import peak_since, start_peak

    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.dim, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(arguments.vocab, arguments.dim, generator=generator)).requires_grad_()
    targets = torch.randint(0, arguments.vocab, (arguments.tokens,), generator=generator)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    chunk = arguments.chunks[0]
    before = start_peak()
    start, cpu = time.perf_counter(), time.process_time()
    if chunk:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_size=chunk, with_entropy=arguments.entropy)
    else:
        logprobs = full_matrix(hidden, weight, targets)
    logprobs.mean().backward()
    return {
        "chunk": chunk,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": peak_since(before),
        "loss": float(logprobs.detach().mean()),
        "grad_norm": float(hidden.grad.norm()),
    }


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """The full matrix and every chunk size."""
    rows = []
    for chunk in (0, *arguments.chunks):
        command = [sys.executable, __file__, "--one", "--chunks", str(chunk)]
        for name in ("vocab", "tokens", "dim", "threads"):
            command += [f"--{name}", str(getattr(arguments, name))]
        command += ["--entropy"] if arguments.entropy else []
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    best = min(row["peak_mb"] for row in rows[1:])
    settings = {name: getattr(arguments, name) for name in ("vocab", "tokens", "dim", "threads", "entropy")}
    return {**settings, "variants": rows, "memory_ratio": rows[0]["peak_mb"] / max(best, 1.0)}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments) if arguments.one else sweep(arguments)))


if __name__ == "__main__":
    main()
