"""An engine and a decoder whose waits use no CPU, with failures on demand."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from datamodules.types import PreparedSample, Sample
from rollout.types import Response


@dataclass(frozen=True)
class FakeDecoder:
    """Prepares a `Sample` after a wait; the sample's problem text says what goes wrong."""

    seconds: float = 0.0
    frame_bytes: int = 1000

    def __call__(self):
        return self.prepare

    def prepare(self, sample: Sample) -> PreparedSample:
        if "decoder raises" in sample.problem:
            raise ValueError(f"{sample.uid}.mp4: damaged")
        if "decoder hangs" in sample.problem:
            file = sample.problem.partition("decoder hangs ")[2]
            if file:
                Path(file).touch()
            time.sleep(3600)
        if "decoder dies" in sample.problem:
            os._exit(7)
        time.sleep(self.seconds)
        # Any array shows how bytes travel.
        frames = np.full(self.frame_bytes, len(sample.uid), dtype=np.uint8)
        return PreparedSample(replace(sample, extra={**sample.extra, "frames": frames}), sample.problem, (1,), (1, 2))


class LatencyEngine:
    """A replica that answers after a wait, and does what the sample's problem text says."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seen: list[str] = []

    async def start(self) -> None:
        return

    async def generate(self, request):
        from eval.engine.errors import EngineLostError

        self.seen.append(request.prompt.uid)
        text = request.prompt.prompt_text
        if "engine raises" in text:
            raise RuntimeError("no room for this prompt")
        if "engine hangs" in text:
            await asyncio.sleep(3600)
        if "engine dies" in text:
            raise EngineLostError("gone")
        await asyncio.sleep(self.seconds)
        return response(text)

    def close(self) -> None:
        return


def response(text: str) -> Response:
    tokens = np.array([1], dtype=np.int32)
    return Response(tokens, np.zeros(1, dtype=np.float32), "stop", f"answer to {text}", 0)
