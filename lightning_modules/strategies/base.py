"""What training asks of a strategy beyond Lightning's own interface: build the policy, average gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lightning_modules.families.base import ModelFamily
    from lightning_modules.families.policy import PolicyModel


class PolicyStrategy:
    """Mixin of the project's strategies. The default is one process that holds the whole model."""

    root_device: torch.device
    """Where this process computes; Lightning's strategies give it."""
    title = "user's own"
    """What the plan of a run calls it."""
    one_device = False
    """Whether it cannot use more than one device."""
    shards_policy = False
    """Whether `build_policy` spreads a model over ranks, which then also manages where its shards live."""

    def build_policy(self, family: ModelFamily, model_path: str, dtype: torch.dtype, **options: Any) -> PolicyModel:
        """Return the policy with its weights, on this strategy's device and in its parallel form."""
        from lightning_modules.strategies.materialise import load_whole

        return load_whole(family, model_path, dtype, device=self.root_device, **options)

    def sync_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over data-parallel ranks after the last micro-batch of an update."""
