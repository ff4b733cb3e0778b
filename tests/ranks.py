"""Run a worker script in several gloo ranks on this machine and return what rank 0 wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT


def run_ranks(worker: str, tmp_path: Path, nproc: int = 2, timeout_s: float = 900, **arguments: Any) -> dict[str, Any]:
    """Start `tests/workers/<worker>.py` under torchrun; it writes JSON to `arguments["out"]` on rank 0.

    Fails with the workers' output when a rank fails or the time is over.
    """
    out = tmp_path / f"{worker}.json"
    spec = tmp_path / f"{worker}_arguments.json"
    spec.write_text(json.dumps({**arguments, "out": str(out)}, default=str))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={nproc}",
        str(ROOT / "tests" / "workers" / f"{worker}.py"),
        str(spec),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert result.returncode == 0, f"{worker} failed:\n{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return json.loads(out.read_text())
