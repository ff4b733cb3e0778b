"""Seeded sampling under chunked prefill on CPU, where vLLM cannot take back a draw by itself.

vLLM samples a token for every request in a step, also for prompts that are only partly computed, discards those and
rewinds the request's generator by its offset. CPU generators have no offset: the rewind raises. Here the state before
the draw is kept and put back, so that a response does not depend on how its prompt was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Rewound(torch.Generator):
    """A CPU generator whose state is put back by the hooks below; the offset arithmetic is a no-op."""

    def get_offset(self) -> int:
        """Nothing to read."""
        return 0

    def set_offset(self, offset: int) -> Rewound:
        """Nothing to set."""
        return self


def keep_generators_of_discarded_tokens(worker: Any) -> None:
    """Install the rewind in a vLLM worker (an argument of `LLM.collective_rpc`)."""
    runner = worker.model_runner
    kept: dict[int, tuple[Any, Any]] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        batch = runner.input_batch
        for row in np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist():
            generator = batch.generators.get(row)
            if generator is None:
                continue
            if not isinstance(generator, Rewound):
                replacement = Rewound(device="cpu")
                replacement.set_state(generator.get_state())
                # The request keeps its generator over preemption, the batch while it is scheduled.
                batch.generators[row] = runner.requests[batch.req_ids[row]].generator = replacement
                generator = replacement
            kept[row] = (generator, generator.get_state())

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for generator, state in kept.values():
            generator.set_state(state)
        kept.clear()

    runner.sampler.register_forward_pre_hook(before, with_kwargs=True)
    runner.sampler.register_forward_hook(after, with_kwargs=True)
