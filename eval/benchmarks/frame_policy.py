"""How many frames of what size an evaluation shows: three policies as `VideoSpec` options.

`official` is what the benchmark itself prescribes, `qwen3vl` what the Qwen3-VL report used (2 fps, at most 2,048
frames, 224k visual tokens; QwenLM/Qwen3-VL#1540), `reference` what EasyVideoR1's scripts use (256 frames).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QWEN3VL_TOKENS = 224_000
POLICIES = ("official", "qwen3vl", "reference")


def frame_options(policy: str, official: Mapping[str, Any] | None = None, factor: int = 32) -> dict[str, Any]:
    """Keyword arguments of `VideoSpec` (or `VideoSpec.for_rules`) for a policy.

    Args:
        policy: official, qwen3vl or reference.
        official: the benchmark's own options (`Benchmark.frames`); empty = it prescribes none, and qwen3vl's apply.
        factor: pixels per side of a visual token (32 for Qwen3-VL, 28 for Qwen2.5-VL).

    Raises:
        ValueError: the policy is unknown.
    """
    if policy == "official" and official:
        return {str(key): value for key, value in official.items()}
    if policy in ("official", "qwen3vl"):
        return {"fps": 2.0, "min_frames": 4, "max_frames": 2048, "total_pixels": QWEN3VL_TOKENS * factor**2}
    if policy == "reference":
        return {"fps": 2.0, "min_frames": 4, "max_frames": 256, "max_pixels": 262_144, "total_pixels": 33_554_432}
    raise ValueError(f"frame policy {policy!r}: use one of {', '.join(POLICIES)}")
