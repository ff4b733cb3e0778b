"""How much faster is the evaluation pipeline than batch after batch? Prints JSON.

    python scripts/bench/eval_pipeline.py                 latency engine and decoder whose waits use no CPU
    python scripts/bench/eval_pipeline.py --vllm          real vLLM on this machine, real clips: records and idle share

With D seconds of decoding and G seconds of generation (at full batches) in total and p preparation processes, no
schedule is faster than max(D/p, G), and batch after batch takes D + G: the bound of the gain is (D+G)/max(D/p, G).
`gain` and `share_of_bound` count everything from the start of the preparation processes to the last record on disk.
`start_s` of it are the seconds until the first process was up; they do not grow with the work, and in a real run they
pass while the engine loads: `share_without_start` leaves them out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datamodules.types import PreparedSample, Sample
from eval.benchmarks import catalogue
from eval.benchmarks.loading import load
from eval.benchmarks.types import BenchmarkItem
from eval.engine.async_driver import AsyncDriver
from eval.engine.generate import LockStepDriver
from eval.engine.vllm_replica import AsyncLLMReplica
from eval.run.pipeline import ask
from eval.run.pool import PreparePool
from eval.run.prepare import PrepareSettings, ReadyItem
from eval.run.records import RecordLog
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.callback import resolve_sampling
from rollout.engines.vllm import VLLMEngine
from rollout.types import GenerateRequest, Response, SamplingSpec

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingSpec(n=1, temperature=0.0, max_tokens=4)


@dataclass(frozen=True)
class WaitingDecoder:
    """Prepares an item by waiting."""

    seconds: float

    def __call__(self):
        """Build the prepare function."""
        return self.prepare

    def prepare(self, item: BenchmarkItem) -> ReadyItem:
        """Wait, then return a prompt without media."""
        time.sleep(self.seconds)
        return ReadyItem(PreparedSample(item.sample, item.sample.problem, (1,), (1,)), 0)


class WaitingEngine:
    """Answers after `seconds`, any number of requests at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerateRequest) -> Response:
        """Wait, then answer."""
        await asyncio.sleep(self.seconds)
        return answer(request)

    def close(self) -> None:
        """Nothing to release."""


def answer(request: GenerateRequest) -> Response:
    """A fixed response."""
    text = f"answer to {request.prompt.prompt_text}"
    return Response(np.array([1], dtype=np.int32), np.zeros(1, dtype=np.float32), "stop", text, 0)


def questions(count: int) -> list[BenchmarkItem]:
    """Text questions."""
    samples = [Sample(f"bench:{i}", f"question {i}", "", "open-ended", "text") for i in range(count)]
    return [BenchmarkItem(sample.uid, sample) for sample in samples]


def synchronous(items: list[BenchmarkItem], decode_s: float, generate_s: float, batch: int) -> float:
    """Seconds of: load a batch one after the other, generate it, load the next."""
    decoder = WaitingDecoder(decode_s)
    started = time.monotonic()
    for start in range(0, len(items), batch):
        for item in items[start : start + batch]:
            decoder.prepare(item)
        time.sleep(generate_s)
    return time.monotonic() - started


def pipelined(items: list[BenchmarkItem], decode_s: float, generate_s: float, batch: int, processes: int) -> dict:
    """Seconds of the real pipeline with the same waits, its processes' start and its records on disk included."""
    started = time.monotonic()
    pool = PreparePool(WaitingDecoder(decode_s), processes=processes)
    pool.start(len(items))
    driver = AsyncDriver([lambda: WaitingEngine(generate_s)], max_in_flight=batch)
    with tempfile.TemporaryDirectory() as folder:
        log = RecordLog(Path(folder) / "answers.jsonl")
        stats = ask(items, pool, driver, GREEDY, log)
        seconds = time.monotonic() - started
        driver.close()
        assert {uid: r["response"] for uid, r in log.records.items()} == {
            item.uid: f"answer to {item.sample.problem}" for item in items
        }
    return {"seconds": seconds, "idle_share": stats.idle_share, "start": pool.stats.start_s}


def measure(name: str, count: int, decode_s: float, generate_s: float, batch: int, processes: int) -> dict:
    """One case: both ways, and the bound."""
    items = questions(count)
    decode, generate = count * decode_s, -(-count // batch) * generate_s
    bound = (decode + generate) / max(decode / processes, generate)
    sync = synchronous(items, decode_s, generate_s, batch)
    found = pipelined(items, decode_s, generate_s, batch, processes)
    return {
        "case": name,
        "items": count,
        "D": round(decode, 3),
        "G": round(generate, 3),
        "p": processes,
        "bound": round(bound, 3),
        "synchronous_s": round(sync, 3),
        "pipeline_s": round(found["seconds"], 3),
        "gain": round(sync / found["seconds"], 3),
        "start_s": round(found["start"], 3),
        "share_of_bound": round((decode + generate) / found["seconds"] / bound, 3),
        "share_without_start": round((decode + generate) / (found["seconds"] - found["start"]) / bound, 3),
        "idle_share": round(found["idle_share"], 3),
    }


def latency(scale: float) -> list[dict]:
    """The latency cases; `scale` lengthens all waits."""
    return [
        measure("decode-bound", 480, 0.3 * scale, 0.3 * scale, 8, 8),
        measure("balanced", 160, 0.1 * scale, 0.6 * scale, 8, 4),
        measure("generation-bound", 160, 0.02 * scale, 0.4 * scale, 8, 4),
    ]


def real_vllm(folder: Path) -> dict:
    """The same items through both drivers on real vLLM: seconds, idle share, and whether the records are equal."""
    import eval_demo

    names = eval_demo.build(folder)
    data, model = folder / ("real" if names == eval_demo.REAL else "drawn"), folder / "tiny-qwen3vl"
    items = [item for name in names for item in load(catalogue.get(name), data)[0]]
    sampling = resolve_sampling(SamplingSpec(n=1, temperature=0.0, max_tokens=32), model, Qwen3VLFamily())
    frames = {"max_frames": 8, "max_pixels": 16384, "min_pixels": 4096}
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "limit_images": 2,
        "limit_videos": 2,
    }
    # The same chunks in both: another split of a prompt rounds differently.
    options |= {"enforce_eager": True, "max_num_batched_tokens": 2048}

    def run(driver) -> tuple[dict, dict]:
        pool = PreparePool(PrepareSettings(str(model), Qwen3VLFamily(), frame_overrides=frames), processes=2)
        with tempfile.TemporaryDirectory() as place:
            log = RecordLog(Path(place) / "answers.jsonl")
            stats = ask(items, pool, driver, sampling, log)
        driver.close()
        kept = {uid: (r["response"], r["num_tokens"], r["prompt"]) for uid, r in log.records.items()}
        span = driver.stats.span_s
        return kept, {"seconds": round(span, 2), "idle_share": round(stats.idle_share, 3)}

    asynchronous, found = run(
        AsyncDriver([lambda: AsyncLLMReplica(model, Qwen3VLFamily(), **options)], max_in_flight=16)
    )
    engine = VLLMEngine(model, Qwen3VLFamily(), **options)
    lock_step, other = run(LockStepDriver(engine.generate, 8, close=engine.close))
    return {
        "case": "real vLLM",
        "items": len(items),
        "identical_records": asynchronous == lock_step,
        "different": {
            uid: [asynchronous[uid], lock_step[uid]] for uid in lock_step if asynchronous[uid] != lock_step[uid]
        },
        "async": found,
        "lock_step": other,
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="real vLLM instead of the latency engine")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all waits of the latency cases")
    arguments = parser.parse_args()
    cases = [real_vllm(ROOT / ".cache" / "eval_demo")] if arguments.vllm else latency(arguments.scale)
    print(json.dumps(cases, indent=1))
    return 0


if __name__ == "__main__":
    # Under its own name: the processes that prepare must find the classes of this file.
    from scripts.bench.eval_pipeline import main as run

    sys.exit(run())
