"""A CSV logger that survives a resume: rows after the resumed step are dropped, earlier ones stay."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from datamodules.common.files import write_text


class AppendingCSVLogger(Logger):
    """Write one row per step to `<save_dir>/metrics.csv`; a new metric adds a column.

    Lightning's own CSVLogger deletes the file of an earlier process of the same run.

    Args:
        save_dir: the run's folder.
        start_step: rows with a step above this one are left from a process that was stopped later; they are dropped.
    """

    def __init__(self, save_dir: str | Path, start_step: int = 0) -> None:
        super().__init__()
        self._path = Path(save_dir) / "metrics.csv"
        self._start_step = start_step
        self._columns: list[str] = ["step"]
        self._rows: dict[int, dict[str, Any]] = {}
        self._loaded = False

    @property
    def name(self) -> str:
        """Logger name."""
        return "csv"

    @property
    def version(self) -> str:
        """Always the same file."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are in the run folder's config.yaml."""
        return

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add `metrics` to the row of `step` and write it."""
        self._load()
        step = int(step or 0)
        row = self._rows.setdefault(step, {"step": step})
        is_last = step == max(self._rows)
        fresh = len(row) == 1
        row.update(metrics)
        new = sorted(set(metrics) - set(self._columns))
        self._columns += new
        if new or not is_last or not fresh:
            self._rewrite()
        else:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            with self._path.open(newline="") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ["step"])
                rows = [{k: v for k, v in row.items() if v not in ("", None)} for row in reader]
            # A killed process can leave half a row at the end; without a step it is no row.
            rows = [row for row in rows if str(row.get("step", "")).isdigit()]
            self._rows = {int(row["step"]): row for row in rows if int(row["step"]) <= self._start_step}
        self._rewrite()

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(self._rows[step] for step in sorted(self._rows))
        write_text(self._path, text.getvalue())
