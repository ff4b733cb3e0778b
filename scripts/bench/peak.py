"""Peak resident memory of a stretch of code on Linux."""

from __future__ import annotations

from pathlib import Path


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory can be measured on Linux only")


def start_peak() -> float:
    """Forget earlier peaks (imports, loading); returns the resident memory now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_since(start_mb: float) -> float:
    """Highest resident memory since `start_peak`, above the value it returned, in MB."""
    return _status("VmHWM") - start_mb
