"""Evaluate a tiny untrained model end to end on this machine: `python scripts/eval_demo.py [key=value ...]`.

With EVR1_TEST_DATA the questions are the real ones of Charades-STA and STVG about the clips in that folder, otherwise
drawn ones in the same file formats. The scores of an untrained model mean nothing; the report shows what one gets.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datamodules.common.files import write_json
from datamodules.demo.synthetic import build_synthetic_dataset, synthetic_corpus
from datamodules.demo.tiny_model import build_tiny_model
from datamodules.records import read_objects
from lightning_modules.launch import evaluate_cli

FOLDER = Path(".cache/eval_demo")
REAL, DRAWN = ("charades_sta", "stvg"), ("charades_sta", "videomme")


def build(folder: Path) -> tuple[str, ...]:
    """Write model and data; returns the names of the benchmarks."""
    build_tiny_model(folder / "tiny-qwen3vl", synthetic_corpus(), seed=0)
    source = os.environ.get("EVR1_TEST_DATA", "")
    if source and (Path(source) / "eval" / "annotations").is_dir():
        return real_data(Path(source).resolve(), folder / "real")
    return drawn_data(folder / "drawn")


def real_data(source: Path, folder: Path) -> tuple[str, ...]:
    """The records whose clips are there, in the files' own format."""
    clips = {path.name: path for path in (source / "videos").iterdir()}
    known = {name.removeprefix("stvg_").removeprefix("svg_") for name in clips} | set(clips)
    for name in REAL:
        with gzip.open(source / "eval" / "annotations" / f"{name}.json.gz") as file:
            records = [record for record in json.load(file) if record["path"] in known]
        write_json(folder / name / f"{name}.json", records)
    (folder / "videos").mkdir(exist_ok=True)
    for name, path in clips.items():
        link = folder / "videos" / name
        if not link.is_symlink():
            link.symlink_to(path)
    return REAL


def drawn_data(folder: Path) -> tuple[str, ...]:
    """Questions about drawn clips: when a circle is visible, which colour a square has."""
    data = build_synthetic_dataset(folder, train_per_task=1, val_per_task=12, tasks=["circle_time", "colour"])
    records = read_objects(data / "val.jsonl")
    for name, kind in zip(DRAWN, ("temporal grounding", "multiple choice"), strict=True):
        chosen = [record for record in records if record["problem_type"] == kind]
        write_json(
            folder / name / f"{name}.json", [reference_record(record, name, i) for i, record in enumerate(chosen)]
        )
    return DRAWN


def reference_record(record: dict, name: str, number: int) -> dict:
    """A drawn record in the reference's annotation format."""
    answer = record["answer"]
    if name == "charades_sta":
        answer = json.dumps({"time": json.loads(answer), "boxes": {}})
    return {
        "problem": record["problem"].replace("<video>", "").strip(),
        "data_type": "video",
        "problem_type": record["problem_type"],
        "options": record.get("options", []),
        "solution": f"<answer>{answer}</answer>",
        "path": record["videos"][0] if isinstance(record["videos"][0], str) else record["videos"][0]["path"],
        "data_source": name,
        "problem_id": number,
        "question_id": f"{number:03d}-1",
        "duration": "short",
    }


def main(overrides: list[str]) -> int:
    """Build, evaluate, report; returns the exit code."""
    names = build(FOLDER)
    where = FOLDER / ("real" if names == REAL else "drawn")
    arguments = [
        f"model={FOLDER / 'tiny-qwen3vl'}",
        f"benchmark=[{','.join(names)}]",
        f"data_root={where}",
        "output_dir=outputs/eval_demo",
        "driver=tiny",
        "sampling.max_tokens=32",
        "frames.max_frames=8",
        "frames.max_pixels=16384",
        "frames.min_pixels=4096",
        f"prepare.cache_dir={FOLDER / 'clips'}",
        "prepare.processes=2",
    ]
    return evaluate_cli.main([*arguments, *overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
