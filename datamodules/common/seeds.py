"""Seeds of responses: a pure function of what the response is, never of how the work was split."""

from __future__ import annotations

import hashlib


def response_seed(run_seed: int, rl_step: int, uid: str, k: int) -> int:
    """Seed of response `k` to sample `uid` at step `rl_step`: stable over processes, machines and rank counts.

    The value has 63 bits, and its low 32 bits alone are as good a seed (torch's CPU generator reads no more).
    An engine's own "seed + index" for n > 1 collides between neighbouring prompts; a hash does not.

    Example: `response_seed(0, 3, "charades:17", 0) != response_seed(0, 3, "charades:17", 1)`.

    Args:
        run_seed: seed of the run.
        rl_step: 0-based step of reinforcement learning.
        uid: identifier of the sample.
        k: 0-based number of the response within its group.
    """
    key = f"{run_seed}|{rl_step}|{k}|{uid}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
