"""Evaluate a model on benchmarks: build the parts that conf/evaluate.yaml names and run them one after the other."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from datamodules.common.files import FolderInUse
from datamodules.common.places import option_files
from eval.benchmarks import catalogue
from eval.benchmarks.loading import file_status
from eval.engine.errors import EngineLostError
from eval.report.write import console_table, read_report, write_reports
from eval.run.prepare import PrepareSettings
from eval.run.records import model_identity
from eval.run.runner import STAGES, BenchmarkRun, RunOptions
from lightning_modules.launch.config import ConfigError, build, nearest, to_plain
from lightning_modules.launch.runs import export_run
from lightning_modules.state.run_folder import CHECKPOINT_DIR
from rollout.callback import resolve_sampling
from rollout.model_folder import model_folder

if TYPE_CHECKING:
    from eval.benchmarks.base import Benchmark
    from eval.engine.generate import Driver
    from eval.run.runner import BenchmarkRun, RunOptions

log = logging.getLogger("evaluate")

_SHARED = ("style", "split", "source", "limit", "available_only", "seed", "retry_failed", "score_timeout_s")
"""Keys of conf/evaluate.yaml that `RunOptions` has, too."""
_ENGINE_KEY = ("dtype", "max_model_len", "extra_options")
"""Options of an engine that may change answers."""


def evaluate_benchmarks(config: DictConfig) -> int:
    """Run the configured stages on every benchmark and write the report; returns the exit code.

    Raises:
        ConfigError: something is wrong before any work starts.
    """

    plain = to_plain(config)
    if plain["stage"] not in STAGES:
        raise ConfigError(f"stage={plain['stage']} is unknown; use one of {', '.join(STAGES)}")
    if plain["stage"] in ("all", "prepare") and not plain["data_root"]:
        raise ConfigError("data_root is not set: add data_root=DIR, the folder with one folder per benchmark")
    if plain["report_items"] < 0:
        raise ConfigError(f"report_items={plain['report_items']} is negative; use 0 for none")
    if plain["baseline"]:
        try:
            read_report(plain["baseline"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    runs = _runs(config, plain)
    driver = _Driver(config)
    router = build(config.reward)
    results, problems = [], []
    try:
        for run in runs:
            try:
                result = run.run(driver, router, plain["stage"])
            except (ValueError, OSError, FolderInUse, EngineLostError) as error:
                log.error("%s: %s", run.benchmark.name, error)
                problems.append(f"{run.benchmark.name}: {error}")
                continue
            except Exception as error:  # an engine that cannot start: it would not for the others either
                log.exception("%s cannot be asked; what is finished is reported", run.benchmark.name)
                problems.append(f"{run.benchmark.name} and what follows: {type(error).__name__}: {error}")
                break
            if problem := result.pop("problem", ""):
                problems.append(f"{run.benchmark.name}: {problem}")
            if result:
                results.append(result)
    finally:
        driver.close()
        router.close()
    if results:
        problems += _report(results, plain, Path(plain["output_dir"]) / runs[0].options.model_name)
    for problem in problems:
        log.error("incomplete: %s", problem)
    return 1 if problems or any(result["unasked"] for result in results) else 0


def _report(results: list[dict[str, Any]], plain: dict[str, Any], folder: Path) -> list[str]:
    """Print the table, write the report; returns what went wrong."""

    for line in console_table(results, plain["baseline"]).splitlines():
        log.info("%s", line)
    try:
        write_reports(
            results,
            folder,
            baseline=plain["baseline"],
            num_items=plain["report_items"],
            tensorboard_step=plain["tensorboard_step"] if plain["tensorboard"] else None,
        )
    except OSError as error:
        return [f"the report could not be written: {error.filename}: {error.strerror}"]
    log.info("report: %s", folder / "report.html")
    return []


class _Driver:
    """Builds the driver when the first benchmark has something to ask, and keeps it for the others."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._driver: Driver | None = None

    def __call__(self) -> Driver:
        if self._driver is None:
            self._driver = build(self._config.driver)()
        return self._driver

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()


def _runs(config: DictConfig, plain: dict[str, Any]) -> list[BenchmarkRun]:

    try:
        names = catalogue.select(plain["benchmarks"])
        benchmarks = [catalogue.get(name) for name in names]
        options, make_settings = _options(config, plain)
        return [BenchmarkRun(benchmark, options, make_settings(benchmark)) for benchmark in benchmarks]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _options(config: DictConfig, plain: dict[str, Any]) -> tuple[RunOptions, Callable[[Benchmark], PrepareSettings]]:

    model = _model(plain["model_path"])
    OmegaConf.update(config, "model_path", str(model))
    folder = model_folder(model)
    if config.family is None:
        OmegaConf.update(config, "family", family_node(folder))
    family = build(config.family)
    greedy = dataclasses.replace(build(config.sampling), n=1)
    engine = plain["driver"]["engine"]
    prepare = plain["prepare"]
    limit = prepare["max_prompt_tokens"] or engine["max_model_len"] - greedy.max_tokens
    if limit < 1:
        raise ConfigError(
            f"driver.engine.max_model_len={engine['max_model_len']} leaves no room for a prompt beside "
            f"sampling.max_tokens={greedy.max_tokens}"
        )
    options = RunOptions(
        output_dir=plain["output_dir"],
        data_root=plain["data_root"] or "",
        model_name=plain["model_name"] or _name(model),
        model_id=model_identity(folder),
        sampling=resolve_sampling(greedy, folder, family),
        engine_key={key: engine[key] for key in _ENGINE_KEY if engine.get(key)},
        processes=prepare["processes"],
        prepare_deadline_s=prepare["deadline_s"],
        max_bytes=int(prepare["max_gib"] * (1 << 30)),
        **{key: plain[key] for key in _SHARED},
    )

    def settings(benchmark: Benchmark) -> PrepareSettings:
        return PrepareSettings(
            model_path=str(folder),
            family=family,
            frame_policy=plain["frame_policy"],
            benchmark_frames=dict(benchmark.frames),
            frame_overrides=_given(plain, "frames"),
            image_options=_given(plain, "images"),
            max_prompt_tokens=limit,
            cache_dir=prepare["cache_dir"],
            cache_codec=prepare["cache_codec"],
            decoder=prepare["decoder"],
            thumbnails=plain["report_items"] > 0,
        )

    return options, settings


def family_node(folder: Path) -> dict[str, str]:
    """`{_target_: ...}` of the family in conf/model, the user's options first, that handles the model in `folder`.

    Raises:
        ConfigError: no family handles it.
    """
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    wanted = json.loads((folder / "config.json").read_text()).get("model_type")
    known = set()
    for file in reversed(option_files("model").values()):
        node = OmegaConf.select(OmegaConf.load(file), "family")
        if node is None:
            continue
        family: Any = get_class(node._target_)
        if family.model_type == wanted:
            return {"_target_": node._target_}
        known.add(family.model_type)
    raise ConfigError(f"no family in conf/model handles model_type={wanted} of {folder}{nearest(str(wanted), known)}")


def _given(plain: dict[str, Any], section: str) -> dict[str, float]:
    found = {key: value for key, value in plain[section].items() if value is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{section}.{key}={value}: a number is expected")
    return found


def _model(path: str) -> Path:
    """The model's folder; a training run's checkpoint, the newest unless one is named, is exported first."""

    folder = Path(path)
    if folder.parent.name == CHECKPOINT_DIR and folder.name.startswith("step_"):
        return export_run(folder.parent.parent, int(folder.name.removeprefix("step_")))
    if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():
        return export_run(folder)
    return folder


def _name(model: Path) -> str:
    """A folder name for a model: its own; of an exported checkpoint also the run's."""
    if model.parent.name == "export":
        return f"{model.parent.parent.name}-{model.name}"
    return model.resolve().name if model.exists() else str(model).replace("/", "--")


def print_list(data_root: str | None) -> int:
    """Print the benchmarks: questions, headline metric, and whether their files are on this disk."""

    rows = [("benchmark", "split", "questions", "metric", "data")]
    for name in catalogue.names():
        benchmark = catalogue.get(name)
        states = file_status(benchmark, data_root) if data_root else []
        found = {state.split: _state(state) for state in states}
        expected = benchmark.expected[benchmark.split]
        data = found.get(benchmark.split, "give data_root=DIR to look")
        rows.append((name, benchmark.split, str(expected or "unknown"), benchmark.metric, data))
    for line in _aligned(rows):
        log.info("%s", line)
    return 0


def _state(status: Any) -> str:
    if status.ready:
        return f"there ({status.source})"
    return "missing: " + ", ".join(status.missing[:2]) + (" ..." if len(status.missing) > 2 else "")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
