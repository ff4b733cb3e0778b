"""Measure how often the initial model solves each training sample, for curricula and for leaving samples out.

`python scripts/filter_by_pass_rate.py experiment=tiny_cpu [key=value ...] [--k 8] [--out FILE] [--keep FILE]` answers
every training sample k times, as in training, and writes {sample id: share of right answers} to --out (default
`<assets_dir>/seed<seed>/pass_rates.json`). --keep also writes the records with min-rate < pass rate < max-rate, each
with its `pass_rate`, as an annotation file.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.common.files import write_json, write_lines
from datamodules.common.processes import die_with_parent
from datamodules.records import read_records
from eval.heldout import EvalRecord, complete, evaluate_batches
from lightning_modules.launch.config import ConfigError, build, build_data, compose, require_values
from lightning_modules.launch.console import configure_logging
from lightning_modules.launch.held_out import lone_engine
from lightning_modules.launch.training import set_threads

log = logging.getLogger("pass_rate")


def main(arguments: Sequence[str]) -> int:
    """Measure and write; returns the exit code."""
    die_with_parent()
    configure_logging()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    parser.add_argument("--k", type=int, default=8, help="answers per sample")
    parser.add_argument("--right", type=float, default=0.5, help="accuracy from which an answer counts as right")
    parser.add_argument("--out", type=Path, help="JSON file of the pass rates")
    parser.add_argument("--keep", type=Path, help="annotation file of the records in between")
    parser.add_argument("--min-rate", type=float, default=0.0, help="records at or below this rate are left out")
    parser.add_argument("--max-rate", type=float, default=1.0, help="records at or above this rate are left out")
    options = parser.parse_args(arguments)
    if options.k < 1:
        log.error("error: --k %d: at least one answer per sample", options.k)
        return 2
    try:
        config = compose("train", options.overrides)
        require_values(config)
        files = config.data.train_files
        # Read first: what is wrong with the records is no news for after the measurement.
        records = [] if options.keep is None else named_records([files] if isinstance(files, str) else files)
        rates = measure(config, options.k, options.right)
    except ConfigError as error:
        log.error("error: %s", error)
        return 2
    out = options.out or Path(config.assets_dir) / f"seed{config.seed}" / "pass_rates.json"
    write_json(out, rates)
    between = {uid: rate for uid, rate in rates.items() if options.min_rate < rate < options.max_rate}
    if options.keep is not None:
        write_lines(options.keep, kept_records(records, between))
    mean = sum(rates.values()) / max(1, len(rates))
    log.info("%d samples, mean pass rate %.3f, %d between the bounds: %s", len(rates), mean, len(between), out)
    return 0


def measure(config: Any, k: int, right: float) -> dict[str, float]:
    """Pass rate per sample id; failed items count as wrong. Each batch is prepared once."""
    set_threads(1, config.trainer.threads_per_rank)
    # The training split takes the place of the held-out one: one pass in file order.
    datamodule = build_data(config, val_files=config.data.train_files)
    datamodule.set_rank(0, 1)
    datamodule.setup()
    router = build(config.reward)
    engine, sampling = lone_engine(config, config.model.path)
    samples = datamodule.val_samples
    by_uid = {sample.uid: sample for sample in samples}
    found: list[list[EvalRecord]] = [[] for _ in range(k)]
    try:
        for batch in datamodule.val_dataloader():
            for number in range(k):
                seed = int(config.seed) * k + number
                found[number] += evaluate_batches([batch], by_uid, engine.generate, router, sampling, seed=seed)
    finally:
        engine.close()
        router.close()
    return pass_rates([complete(records, samples) for records in found], right)


def pass_rates(rounds: Iterable[Sequence[EvalRecord]], right: float) -> dict[str, float]:
    """Share of right answers per sample id, over rounds of one answer each."""
    values: dict[str, list[bool]] = defaultdict(list)
    for records in rounds:
        for record in records:
            values[record.uid].append(record.accuracy >= right)
    return {uid: sum(hits) / len(hits) for uid, hits in values.items()}


def named_records(files: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """(sample id, record as it stands in the file) of all annotation files.

    Raises:
        ConfigError: a file cannot be read, or a record has no `problem_id` to be found by.
    """
    named = []
    for file in files:
        try:
            rows = list(read_records(Path(file)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for line, record in rows:
            identifier = record.get("problem_id") if isinstance(record, dict) else None
            if identifier in (None, ""):
                raise ConfigError(f"--keep finds records by their problem_id; {file}:{line} has none")
            named.append((f"{record.get('data_source') or Path(file).name.split('.')[0]}:{identifier}", record))
    return named


def kept_records(named: Iterable[tuple[str, dict[str, Any]]], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """The records of the samples in `rates`, each with its `pass_rate`."""
    return [{**record, "pass_rate": rates[uid]} for uid, record in named if uid in rates]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
