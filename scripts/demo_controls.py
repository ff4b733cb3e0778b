"""Run the demo and its controls for several seeds and print the tables of docs/quickstart.md.

`python scripts/demo_controls.py [seeds=11,12,13] [output_dir=outputs/controls] [controls=true] [algorithms=grpo,dapo]`

Per seed: held-out accuracy per task before and after RL, with media swapped between samples, and of the best constant
answer; after RL on rewards dealt out at random; after supervised training on the same noisy labels for the same time.
With `algorithms`, also the demo with each of them, on the first seed. What is finished is not run again.
"""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.annotations import load_samples
from datamodules.common.files import write_json, write_text
from datamodules.common.places import CONF_DIR, ROOT
from lightning_modules.launch.config import ConfigError, build, nearest
from lightning_modules.launch.console import configure_logging
from lightning_modules.launch.runs import load_run_config

log = logging.getLogger("controls")
OPTIONS = {"seeds": "11,12,13", "output_dir": "outputs/controls", "controls": "true", "algorithms": ""}
TEXT_TASKS = ("largest",)
"""Tasks without media: not in the visual mean."""


def call(*arguments: str) -> float:
    """Run a Python program of this repository; returns its wall time in seconds."""
    started = time.monotonic()
    log.info("$ python %s", " ".join(arguments))
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    return time.monotonic() - started


def run_dir(output: Path, name: str, run_name: str) -> Path:
    """Folder of a run with a given name."""
    return output / name / run_name


def evaluated(folder: Path, swapped: bool = False) -> dict[str, float]:
    """Accuracy per task of a run's newest checkpoint; evaluates it if nobody did."""
    path = folder / "evaluation" / ("swapped.json" if swapped else "final.json")
    if not path.is_file():
        code = (
            "import sys; from pathlib import Path; from lightning_modules.launch.console import configure_logging; "
            "from lightning_modules.launch.held_out import evaluate_run; configure_logging(); "
            "evaluate_run(Path(sys.argv[1]), swap_media=sys.argv[2] == 'True')"
        )
        call("-c", code, str(folder), str(swapped))
    return json.loads(path.read_text())["accuracy"]


def before(folder: Path) -> dict[str, float]:
    """Accuracy per task before the first step."""
    groups: dict[str, list[float]] = {}
    for record in json.loads((folder / "evaluation" / "step_000000.json").read_text())["records"]:
        groups.setdefault(record["data_source"], []).append(record["accuracy"])
    return {task: sum(values) / len(values) for task, values in groups.items()}


def constants(folder: Path) -> dict[str, float]:
    """Per task the held-out accuracy of the best single answer out of all that occur."""
    config = load_run_config(folder)
    router = build(config.reward)
    groups, _ = load_samples(list(config.data.val_files), router.type_name)
    by_task: dict[str, list] = {}
    for sample in (s for group in groups for s in group):
        by_task.setdefault(sample.data_source, []).append(sample)
    best = {}
    for task, samples in by_task.items():
        answers = sorted({s.answer for s in samples})
        means = [_mean_score(router, samples, answer) for answer in answers]
        best[task] = max(means)
    router.close()
    return best


def _mean_score(router, samples: list, answer: str) -> float:
    scores = [
        router.score(
            response=f"<answer>{answer}</answer>",
            ground_truth=s.answer,
            problem_type=s.problem_type,
            options=s.options,
        ).accuracy
        for s in samples
    ]
    return sum(scores) / len(scores)


def training_seconds(folder: Path) -> float:
    """Sum of the step times of a run, evaluation between steps included."""
    with (folder / "metrics.csv").open(newline="") as file:
        return sum(float(row["time/step_s"] or 0) for row in csv.DictReader(file))


def visual(accuracy: dict[str, float]) -> float:
    """Mean over the tasks that have media."""
    kept = [value for task, value in accuracy.items() if task not in (*TEXT_TASKS, "all")]
    return sum(kept) / len(kept)


def trained(output: Path, name: str, run_name: str, seed: int, *overrides: str) -> Path:
    """Folder of a finished training run, which is made if it is not there."""
    folder = run_dir(output, name, run_name)
    status = folder / "status.json"
    if not (status.is_file() and json.loads(status.read_text())["state"] == "finished"):
        call("train.py", *overrides, f"seed={seed}", f"output_dir={output}", f"run_name={run_name}")
    return folder


def measure(seed: int, output: Path, with_controls: bool) -> dict:
    """Everything about one seed."""
    demo = trained(output, "tiny_cpu", f"seed{seed}", seed, "experiment=tiny_cpu")
    seconds = training_seconds(demo)
    result = {
        "seed": seed,
        "rl_seconds": round(seconds),
        "before": before(demo),
        "after": evaluated(demo),
        "swapped": evaluated(demo, swapped=True),
        "constant": constants(demo),
    }
    if with_controls:
        permuted = ("experiment=tiny_cpu", "debug=permuted_rewards", "stages=null")
        result["permuted"] = evaluated(trained(output, "permuted_rewards", f"seed{seed}", seed, *permuted))
        supervised = (
            "experiment=tiny_sft",
            "max_steps=100000",
            f"callbacks.stop.max_seconds={round(seconds)}",
            "module.export_to=null",
        )
        result["supervised"] = evaluated(trained(output, "tiny_sft", f"supervised{seed}", seed, *supervised))
    return result


def compare(names: list[str], seed: int, output: Path) -> list[str]:
    """Markdown table of the demo with other algorithms."""
    lines = [
        "| algorithm | visual mean before | after | worst visual task | text | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        own = f"tiny_cpu_{name}"  # where an algorithm needs other settings than the demo's
        experiment = own if (CONF_DIR / "experiment" / f"{own}.yaml").is_file() else "tiny_cpu"
        chosen = (f"experiment={experiment}", f"algorithm={name}", "stages=null")
        folder = trained(output, experiment, f"{name}{seed}", seed, *chosen)
        after = evaluated(folder)
        worst = min((value, task) for task, value in after.items() if task not in (*TEXT_TASKS, "all"))
        lines.append(
            f"| {name} | {visual(before(folder)):.3f} | {visual(after):.3f} | {worst[1]} {worst[0]:.2f} "
            f"| {after[TEXT_TASKS[0]]:.2f} | {training_seconds(folder):.0f} |"
        )
    return lines


def tables(results: list[dict]) -> list[str]:
    """Markdown: one table per seed and one line per seed with the means."""
    columns = [c for c in ("before", "after", "swapped", "constant", "permuted", "supervised") if c in results[0]]
    lines = []
    for result in results:
        lines += [f"Seed {result['seed']}: {result['rl_seconds']} s of RL.", "", f"| task | {' | '.join(columns)} |"]
        lines.append("|---|" + "---|" * len(columns))
        for task in sorted(result["before"]):
            lines.append(f"| {task} | " + " | ".join(f"{result[c][task]:.2f}" for c in columns) + " |")
        lines.append("| **visual mean** | " + " | ".join(f"**{visual(result[c]):.3f}**" for c in columns) + " |")
        lines.append("")
    return lines


def main(arguments: list[str]) -> int:
    """Run, write `<output_dir>/controls.json` and `controls.md`, print the tables."""
    configure_logging()
    options = dict(OPTIONS) | dict(a.partition("=")[::2] for a in arguments)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        log.error("error: %s", ConfigError(f"unknown option '{unknown[0]}'{nearest(unknown[0], OPTIONS)}"))
        return 2
    output = Path(options["output_dir"])
    seeds = [int(seed) for seed in options["seeds"].split(",")]
    results = [measure(seed, output, options["controls"] == "true") for seed in seeds]
    lines = tables(results)
    if options["algorithms"]:
        lines += compare(options["algorithms"].split(","), seeds[0], output)
    write_json(output / "controls.json", results)
    text = "\n".join(lines)
    write_text(output / "controls.md", text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
