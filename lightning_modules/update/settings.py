"""Settings of an update: how a step's rollouts become optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_modules.algorithms.importance import ImportanceCorrection


@dataclass(frozen=True)
class UpdateSettings:
    """How a step's rollouts become optimizer steps."""

    temperature: float = 1.0
    """The sampling temperature; the trainer divides its logits by it."""
    micro_batch_tokens: int = 16384
    """Most tokens (prompt, responses and padding) of one micro-batch."""
    update_batch_size: int | None = None
    """Prompts per optimizer step over all ranks; None = the whole rollout batch (one on-policy update)."""
    epochs: int = 1
    """Passes over each rollout batch."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None = no clipping."""
    entropy: bool = True
    """Compute token entropies (a diagnostic, and what an entropy bonus needs)."""
    entropy_bonus: float = 0.0
    """Weight of the entropy that is added to the objective."""
    skip_zero_advantage: bool = False
    """Leave responses with advantage 0 out of the forward where they cannot change the gradient (no KL in the loss, no
    entropy bonus). The update is the same; token diagnostics then describe the remaining responses only."""
    importance: ImportanceCorrection | None = None
    """Correction for the engine's slightly different distribution; None = off."""
    patch_cache_mb: int = 1024
    """Memory for patches that a step's further passes (old and reference log-probs, epochs, split groups) use again."""
    max_bad_updates: int = 3
    """Non-finite updates in a row after which the run stops."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: training needs samples of a positive temperature")
        for name in ("micro_batch_tokens", "epochs", "max_bad_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.patch_cache_mb < 0:
            raise ValueError(f"patch_cache_mb={self.patch_cache_mb} must not be negative (0 keeps nothing)")
        if self.entropy_bonus and not self.entropy:
            raise ValueError(f"entropy_bonus={self.entropy_bonus} needs entropy: true")
        if self.update_batch_size is not None and self.update_batch_size < 1:
            raise ValueError(f"update_batch_size={self.update_batch_size} must be at least 1, or null for all")
