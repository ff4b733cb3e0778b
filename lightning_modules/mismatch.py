"""Stop a run whose engine no longer samples what the trainer computes (stale weights, positions, pixels)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class MismatchGate:
    """Bounds on the difference of engine and trainer log-probs, checked after every step.

    Args:
        max_kl: largest mean KL per token (k3 estimate), over all tokens and for each modality; None = not bounded.
        max_diff: largest difference of one token's log-prob; None = not bounded.
        patience: steps in a row beyond a bound after which the run stops; earlier ones are warned about.
    """

    def __init__(self, max_kl: float | None = 0.05, max_diff: float | None = None, patience: int = 1) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience} must be at least 1")
        self.max_kl = max_kl
        self.max_diff = max_diff
        self.patience = patience
        self.violations_in_a_row = 0

    def check(self, metrics: Mapping[str, float]) -> None:
        """Look at a step's reduced metrics.

        Raises:
            RuntimeError: the bounds were exceeded `patience` times in a row.
        """
        found = [
            f"{name}={value:.4g} > {bound}"
            for prefix, bound in (("mismatch/kl", self.max_kl), ("mismatch/max_diff", self.max_diff))
            for name, value in sorted(metrics.items())
            # `not <=` so that NaN is a violation.
            if bound is not None and name.startswith(prefix) and not value <= bound
        ]
        if not found:
            self.violations_in_a_row = 0
            return
        self.violations_in_a_row += 1
        message = f"engine and trainer disagree: {', '.join(found)}"
        if self.violations_in_a_row >= self.patience:
            raise RuntimeError(
                f"{message}. The engine's weights, caches, positions or precision differ from the trainer's; "
                "run the parity preflight, or raise the bound (module.mismatch_gate)"
            )
        log.warning("%s (%d of %d)", message, self.violations_in_a_row, self.patience)
