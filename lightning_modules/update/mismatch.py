"""Stop a run whose engine no longer samples what the trainer computes (stale weights, positions, pixels)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class MismatchGate:
    """Bounds on the difference of engine and trainer log-probs, checked on every step before its first optimizer step.

    Samples beyond a bound are never trained on: the step is skipped and the engine gets the weights once more.

    Args:
        max_kl: largest mean KL per token (k3 estimate), over all tokens and for each modality; None = not bounded.
        max_diff: largest difference of one token's log-prob; None = not bounded.
        patience: steps in a row beyond a bound after which the run stops; earlier ones are skipped with a warning.
    """

    def __init__(self, max_kl: float | None = 0.05, max_diff: float | None = None, patience: int = 1) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience} must be at least 1")
        for name, bound in (("max_kl", max_kl), ("max_diff", max_diff)):
            if bound is not None and bound <= 0:
                raise ValueError(f"{name}={bound} would refuse every step: give a positive bound, or null for none")
        self.max_kl = max_kl
        self.max_diff = max_diff
        self.patience = patience
        self.violations_in_a_row = 0

    def accepts(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these reduced metrics may be trained on; without any comparison it may.

        Raises:
            RuntimeError: the bounds were exceeded `patience` times in a row.
        """
        if not any(name.startswith("mismatch/") for name in metrics):
            return True  # nothing was compared, so earlier violations still count
        found = [
            f"{name}={value:.4g} > {bound}"
            for prefix, bound in (("mismatch/kl", self.max_kl), ("mismatch/max_diff", self.max_diff))
            for name, value in sorted(metrics.items())
            # `not <=` so that NaN is a violation.
            if bound is not None and name.startswith(prefix) and not value <= bound
        ]
        if not found:
            self.violations_in_a_row = 0
            return True
        self.violations_in_a_row += 1
        message = f"engine and trainer disagree: {', '.join(found)}"
        if self.violations_in_a_row >= self.patience:
            raise RuntimeError(
                f"{message}; nothing was trained on these samples. The engine's weights, caches, positions or "
                "precision differ: compare rollout=hf, or raise the bound (module.mismatch_gate)"
            )
        log.warning(
            "%s (%d of %d): this step is skipped, the engine gets the weights again",
            message,
            self.violations_in_a_row,
            self.patience,
        )
        return False
