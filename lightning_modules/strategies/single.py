"""strategy=single: one process, one device."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_modules.strategies.base import PolicyStrategy


class SingleStrategy(PolicyStrategy, SingleDeviceStrategy):
    """Lightning's single-device strategy."""

    title = "single"
    one_device = True


def build(accelerator: str, devices: int, num_nodes: int) -> SingleStrategy:
    """Create the strategy.

    Raises:
        ValueError: more than one device was asked for.
    """
    if devices * num_nodes != 1:
        raise ValueError(
            f"strategy=single uses one device, but trainer.devices={devices} and trainer.num_nodes={num_nodes}; "
            "use strategy=fsdp or strategy=ddp"
        )
    return SingleStrategy(device="cuda:0" if accelerator in ("gpu", "cuda") else "cpu")
