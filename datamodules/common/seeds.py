"""Random numbers that are a pure function of what they are for, never of how the work was split or where it resumed.

Library generators may change their streams between versions; these hashes do not.
"""

from __future__ import annotations

import hashlib


def draw(*key: object) -> int:
    """64 well-mixed bits that depend on `key` alone: equal in every process, on every machine, after every resume.

    Example: `draw("offline", 0, 3, "charades:17")`; the first part says what the number is for.
    """
    text = "|".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(*key: object) -> float:
    """A number in [0, 1) that depends on `key` alone."""
    return draw(*key) / 2**64


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
    return draw(run_seed, rl_step, k, uid) >> 1


def label_noise(seed: int, step: int, uid: str) -> tuple[float, int]:
    """(number in [0, 1), 32 further bits) for the noise on a sample's label at one step of supervised training."""
    digest = hashlib.sha256(f"{seed}:{step}:{uid}".encode()).digest()
    return int.from_bytes(digest[:4], "little") / 2**32, int.from_bytes(digest[4:8], "little")
