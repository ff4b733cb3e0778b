"""What can go wrong with an engine that answers an evaluation."""

from __future__ import annotations


class EngineLostError(RuntimeError):
    """The engine is gone; what was in flight may be asked again elsewhere."""


class DeadlineError(RuntimeError):
    """A call of the engine did not end in time."""
