"""Evaluate a training run's newest checkpoint on its held-out split, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from datamodules.common.files import write_json
from eval.heldout import complete, evaluate_batches, summarise
from lightning_modules.launch.config import ConfigError, build, build_data
from lightning_modules.launch.runs import export_run, load_run_config
from lightning_modules.launch.training import set_threads
from rollout.callback import resolve_sampling

if TYPE_CHECKING:
    from datamodules.types import Sample
    from eval.heldout import EvalRecord
    from rollout.types import Engine, SamplingSpec

log = logging.getLogger("evaluate")


def evaluate_run(run_dir: Path, swap_media: bool = False) -> dict[str, Any]:
    """Answer the held-out split greedily with the exported model, score it as training does, write and print a table.

    Args:
        run_dir: the run's folder.
        swap_media: give every sample the media of another one of its data source: what is left then was not seen.

    Returns:
        {"step", "metrics", "accuracy" per data source}; with the records also in `<run_dir>/evaluation/final.json`
        (`swapped.json`).

    Raises:
        ConfigError: no run folder, no checkpoint, or no held-out split.
    """

    config = load_run_config(run_dir)
    if config.data.get("family") is None:
        raise ConfigError(
            f"{run_dir} was trained by an earlier version, whose settings name parts that have moved since: evaluate "
            f"it with that version, or write its model with scripts/export_hf.py {run_dir} and use model=FOLDER"
        )
    if not config.data.get("val_files"):
        raise ConfigError(f"{run_dir} has no held-out split (data.val_files)")
    model = export_run(run_dir)
    set_threads(1, config.trainer.threads_per_rank)
    OmegaConf.update(config, "data.model_path", str(model))
    datamodule = build_data(config)
    datamodule.set_rank(0, 1)
    datamodule.setup()
    if swap_media:
        datamodule.val_samples = with_swapped_media(datamodule.val_samples)
    router = build(config.reward)
    engine, sampling = lone_engine(config, model)
    greedy = dataclasses.replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1)
    started = time.monotonic()
    try:
        samples = {sample.uid: sample for sample in datamodule.val_samples}
        found = evaluate_batches(
            datamodule.val_dataloader(), samples, engine.generate, router, greedy, seed=int(config.seed)
        )
    finally:
        engine.close()
        router.close()
    records = complete(found, list(samples.values()))
    metrics = summarise(records) | {"val/seconds": time.monotonic() - started}
    rows = [dataclasses.asdict(record) for record in records]
    result = {
        "step": int(model.name.rpartition("_")[2]),
        "model": str(model),
        "metrics": metrics,
        "accuracy": _by_source(rows),
    }
    name = "swapped.json" if swap_media else "final.json"
    write_json(run_dir / "evaluation" / name, {**result, "records": rows})
    for line in table_lines(records, _before(run_dir)):
        log.info("%s", line)
    return result


def lone_engine(config: DictConfig, model_path: str | Path) -> tuple[Engine, SamplingSpec]:
    """A run's engine on one device with the weights of `model_path`, and the run's sampling with its token ids."""

    sampling = resolve_sampling(build(config.rollout.sampling), model_path, build(config.model.family))
    alone = {"tensor_parallel_size": 1, "load_weights": True}
    extra = {key: value for key, value in alone.items() if key in config.rollout.engine}
    return build(config.rollout.engine, model_path=str(model_path), **extra)(), sampling


def with_swapped_media(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Each sample with the media of a random one of its data source whose answer differs, where there is one.

    The next one would not do: in files whose answers follow each other in a pattern, neighbours can be alike.
    """
    rng = random.Random(seed)
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.data_source, []).append(sample)
    result = []
    for sample in samples:
        others = [other for other in groups[sample.data_source] if other.answer != sample.answer]
        donor = rng.choice(others) if others else sample
        result.append(dataclasses.replace(sample, images=donor.images, videos=donor.videos))
    return result


def _before(run_dir: Path) -> dict[str, float]:
    """Accuracy per data source before the first step, where the run measured it."""
    path = run_dir / "evaluation" / "step_000000.json"
    if not path.is_file():
        return {}
    return _by_source(json.loads(path.read_text())["records"])


def _by_source(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for record in records:
        for name in (record["data_source"] or record["problem_type"], "all"):
            groups.setdefault(name, []).append(float(record["accuracy"]))
    return {name: sum(values) / len(values) for name, values in groups.items()}


def table_lines(records: Sequence[EvalRecord], before: dict[str, float]) -> list[str]:
    """Accuracy per data source before and after, failed and unparsed items in the denominator."""
    after = _by_source([dataclasses.asdict(record) for record in records])
    counts: dict[str, int] = {}
    for record in records:
        for name in (record.data_source or record.problem_type, "all"):
            counts[name] = counts.get(name, 0) + 1
    width = max(len(name) for name in after)
    lines = [f"{'held-out accuracy':<{width}}  items  before  after"]
    names = sorted(name for name in after if name != "all")
    for name in [*names, "all"]:
        start = f"{before[name]:.3f}" if name in before else "     "
        lines.append(f"{name:<{width}}  {counts[name]:5d}  {start:>6}  {after[name]:.3f}")
    failed = sum(record.state == "failed" for record in records)
    unparsed = sum(record.state == "unparsed" for record in records)
    lines.append(f"{failed} failed and {unparsed} unparsed items count as 0")
    return lines
