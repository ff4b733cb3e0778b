"""How much of something offline there is in a step: a share that moves linearly."""

from __future__ import annotations


class Share:
    """A share in [0, 1] that moves linearly from `start` to `end` during the first `steps` RL steps.

    Example: `Share(1.0, end=0.0, steps=100)` is 1 at step 0, 0.5 at step 50 and 0 from step 100 on.

    Args:
        start: value at step 0.
        end: value from step `steps` on; None = constant.
        steps: RL steps until the end.

    Raises:
        ValueError: a value is no share, or an end without steps.
    """

    def __init__(self, start: float, end: float | None = None, steps: int = 0) -> None:
        check_share("start", start)
        optional_share("end", end)
        if steps < 0 or (end is not None and end != start and steps < 1):
            raise ValueError(f"steps={steps}: a share that moves from {start} to {end} needs at least one step")
        self.start = float(start)
        self.end = float(start if end is None else end)
        self.steps = int(steps)

    def __call__(self, step: int) -> float:
        """The share at RL step `step` (0-based)."""
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * step / self.steps


def as_share(value: float | Share) -> Share:
    """`value` as a schedule; a number is a constant one."""
    return value if isinstance(value, Share) else Share(value)


def check_share(name: str, value: float) -> float:
    """`value`, when it is a number in [0, 1]; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} is out of range: a number between 0 and 1 is expected")
    return value


def optional_share(name: str, value: float | None) -> float | None:
    """The same for an option that None switches off."""
    return None if value is None else check_share(name, value)
