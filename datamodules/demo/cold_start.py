"""A task that a policy cannot stumble into: name the colour of a square in an image, in one fixed sentence.

The sentence is several tokens long and only the whole of it counts, so a random policy never earns a reward. Every
training record carries a trajectory (`offline_output`) that shows the sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from datamodules.common.files import write_lines
from datamodules.demo.synthetic import COLOURS, build_synthetic_dataset
from datamodules.records import read_objects

SENTENCE = "the square is {colour}"
PROBLEM_TYPE = "ocr"
"""Compared as text; with `metric: exact` there is no credit for a part of the sentence."""


def build_cold_start_dataset(
    folder: str | Path,
    train_count: int = 240,
    val_count: int = 40,
    seed: int = 0,
    wrong_share: float = 0.0,
    num_tokens: Callable[[str], int] | None = None,
) -> Path:
    """Write images, `cold_train.jsonl` and `cold_val.jsonl` under `folder`.

    Args:
        folder: target and media root.
        train_count: training records.
        val_count: held-out records, without trajectories.
        seed: of the drawings.
        num_tokens: tokens of a trajectory, end token included. When given, records carry `offline_logprobs` of 0: the
            author of the trajectories never says anything else.
        wrong_share: this share of the trajectories (evenly spread) names another colour, for quality thresholds.

    Raises:
        ValueError: `wrong_share` is not a share.
    """
    if not 0.0 <= wrong_share <= 1.0:
        raise ValueError(f"wrong_share={wrong_share} must lie between 0 and 1")
    folder = build_synthetic_dataset(folder, train_count, val_count, tasks=["image_colour"], seed=seed)
    for split in ("train", "val"):
        drawn = read_objects(folder / f"{split}.jsonl")
        records = [_record(record, split, i, wrong_share, num_tokens) for i, record in enumerate(drawn)]
        write_lines(folder / f"cold_{split}.jsonl", records)
    return folder


def cold_start_corpus() -> list[str]:
    """Texts of the answers, for the tokenizer."""
    return [f"<answer>{SENTENCE.format(colour=colour)}</answer>" for colour in COLOURS]


def _record(record: dict, split: str, number: int, wrong_share: float, num_tokens: Callable[[str], int] | None) -> dict:
    names = list(COLOURS)
    colour = "ABCD".index(record.pop("answer"))
    del record["options"]
    shown = colour
    if int((number + 1) * wrong_share) > int(number * wrong_share):
        shown = (colour + 1) % len(names)
    record |= {
        "problem_type": PROBLEM_TYPE,
        "data_source": "cold_start",
        "answer": SENTENCE.format(colour=names[colour]),
    }
    if split == "train":
        record["offline_output"] = f"<answer>{SENTENCE.format(colour=names[shown])}</answer>"
        if num_tokens is not None:
            record["offline_logprobs"] = [0.0] * num_tokens(record["offline_output"])
    return record
