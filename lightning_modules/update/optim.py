"""AdamW with one learning rate per part of the model, a schedule, and gradient clipping that knows sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from lightning_modules.families.base import PARTS

if TYPE_CHECKING:
    from torch import nn

    from lightning_modules.families.base import ModelFamily

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser and schedule of a run."""

    lr: float = 1e-6
    """Learning rate of every part that `part_lr` does not name."""
    part_lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rate per part: vision_tower, merger, language_model. 0 is allowed; to save memory freeze instead."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """On matrices only; norms and biases are not decayed."""
    schedule: ScheduleKind = "constant"
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Optimizer steps until the floor is reached; needed by linear and cosine."""
    floor: float = 0.0
    """Fraction of the learning rate that linear and cosine end at."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None = no clipping (the norm is still logged)."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.part_lr) - set(PARTS))
        if unknown:
            raise ValueError(f"part_lr names {unknown}; the parts of a model are {list(PARTS)}")
        for name, rate in {"lr": self.lr, **{f"part_lr.{part}": rate for part, rate in self.part_lr.items()}}.items():
            if rate < 0:
                raise ValueError(f"{name}={rate} is negative; 0 keeps a part where it is")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} must be two numbers in [0, 1)")
        for name in ("eps", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule={self.schedule!r} is unknown; choose constant, linear or cosine")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps < 1):
            raise ValueError(
                f"schedule={self.schedule!r} needs total_steps, the optimizer steps until the floor: "
                f"got {self.total_steps}"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive, or null for no clipping")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor} is a fraction of the learning rate: 0 to 1")


def check_frozen_parts(parts: Collection[str]) -> None:
    """Raise ValueError for parts that no model has, and when nothing would be left to train."""
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(f"frozen_parts names {unknown}; the parts of a model are {list(PARTS)}")
    if set(parts) == set(PARTS):
        raise ValueError(f"frozen_parts={list(parts)} leaves nothing to train: take one out")


def schedule_factor(step: int, settings: OptimizerSettings) -> float:
    """Factor on the learning rate of optimizer step `step` (0-based).

    Example: warmup_steps=4 gives 0.25, 0.5, 0.75, 1.0 for steps 0 to 3.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    span = max(1, (settings.total_steps or 0) - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    shape = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.floor + (1 - settings.floor) * shape


def build_optimizer(
    model: nn.Module, family: ModelFamily, settings: OptimizerSettings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over the trainable parameters, grouped by (part, decayed or not), with its schedule.

    Raises:
        ValueError: nothing is trainable.
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((family.part_of(name), parameter.ndim >= 2), []).append(parameter)
    if not groups:
        raise ValueError("every part of the model is frozen: nothing to train")
    optimizer = torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": settings.part_lr.get(part, settings.lr),
                "weight_decay": settings.weight_decay if decayed else 0.0,
                "part": part,
            }
            for (part, decayed), parameters in sorted(groups.items(), key=lambda item: item[0])
        ],
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(step, settings))
    return optimizer, scheduler


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients in place to a global L2 norm of at most `max_norm`; return the norm before.

    Sharded gradients (DTensor) are reduced over ranks, so every rank gets the same number.
    """
    from torch.distributed.tensor import DTensor

    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    norm = torch.nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value = float(norm)
    if max_norm is not None and math.isfinite(value) and value > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (value + 1e-6))
    return value


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Current learning rate of each trained part."""
    return {group.get("part", "all"): group["lr"] for group in optimizer.param_groups}
