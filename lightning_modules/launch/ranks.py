"""Let the ranks of a job that somebody else launched (torchrun, srun) agree on the run folder before training."""

from __future__ import annotations

import os
from datetime import timedelta

from datamodules.common.wire import pack, unpack
from lightning_modules.launch.plan import RunPlan

PLAN_ENV = "EVR1_RUN_PLAN"
"""Run folder and checkpoint, fixed by the first process and read by the ranks it starts."""


def plan_to_json(plan: RunPlan) -> str:
    """What the first process says to the others."""
    return pack(plan).text.decode()


def plan_from_json(text: str) -> RunPlan:
    """Inverse of `plan_to_json`."""
    return unpack(text.encode(), only=(RunPlan,))


def inherited_plan() -> RunPlan | None:
    """The plan the parent process fixed, or None."""
    text = os.environ.get(PLAN_ENV)
    return plan_from_json(text) if text else None


def share_plan(plan: RunPlan | None, timeout_s: float = 600.0) -> RunPlan:
    """Rank 0 gives its plan to the others through the job's rendezvous store.

    Each rank looking at the disk by itself could disagree: a folder may appear while others still look.

    Args:
        plan: rank 0's plan; ignored elsewhere.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        assert plan is not None
        return plan
    from torch.distributed import PrefixStore, TCPStore

    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(os.environ["MASTER_PORT"]) + (0 if agent_store else 1)
    store = PrefixStore(
        f"evr1_plan_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            None if agent_store else world,
            is_master=not agent_store and rank == 0,
            timeout=timedelta(seconds=timeout_s),
        ),
    )
    if rank == 0:
        assert plan is not None
        store.set("plan", plan_to_json(plan))
    shared = plan_from_json(store.get("plan").decode())
    if not agent_store:  # rank 0 hosts the store and must outlive the readers
        store.set(f"read {rank}", "")
        if rank == 0:
            store.wait([f"read {other}" for other in range(world)])
    return shared
