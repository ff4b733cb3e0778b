"""Draw and encode a small data set of real media files whose questions a tiny model can learn to answer.

Six tasks, one per kind of data and reward: colour of a square in a video (multiple choice), number of flashes
(numerical), whether a red frame occurs (boolean), when a circle is visible (temporal grounding), colour of a square in
an image (multiple choice), the largest of three digits (text). Videos are H.264 files of 8 frames of 64x96 at 2 fps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from datamodules.annotations import to_sample
from datamodules.common.files import write_json, write_lines
from datamodules.prompts import PromptTemplates

logger = logging.getLogger(__name__)

HEIGHT, WIDTH = 64, 96
FPS = 2
NUM_FRAMES = 8
PATCH_FRAMES = 2
"""Frames of one temporal patch (one second): what happens, happens in whole patches."""
NUM_PATCHES = NUM_FRAMES // PATCH_FRAMES
COLOURS = {"red": (220, 40, 40), "blue": (50, 70, 230), "green": (40, 190, 60), "yellow": (230, 215, 50)}
OPTIONS = [f"{letter}. {name}" for letter, name in zip("ABCD", COLOURS, strict=True)]
RECIPE_VERSION = 5

Drawing = tuple[np.ndarray, dict[str, Any]]
"""(uint8 [T, H, W, 3], or [H, W, 3] for an image; the record's fields)"""


@dataclass(frozen=True)
class Task:
    """One kind of question."""

    name: str
    problem_type: str
    data_type: str
    draw: Callable[[np.random.Generator, int], Drawing] | None = None
    """(random generator, running number) -> drawing; the number balances the answers. None = a text question."""
    train_share: int = 1
    """Factor on the number of training records, for tasks that need more practice."""


def build_synthetic_dataset(
    folder: str | Path,
    train_per_task: int = 300,
    val_per_task: int = 40,
    tasks: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Write `media/`, `train.jsonl` and `val.jsonl` under `folder`; an existing data set of the same recipe is kept.

    Args:
        folder: target; relative paths in the records start here (use it as media_root).
        train_per_task: training records per task (times its `train_share`).
        val_per_task: held-out records per task; text questions never occur in both splits.
        tasks: names out of `TASKS`; None = all.
        seed: seed of all drawings.

    Raises:
        ValueError: unknown task, or more text questions wanted than exist.
    """
    folder = Path(folder)
    names = list(TASKS) if tasks is None else list(tasks)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"unknown synthetic tasks {unknown}; known: {', '.join(TASKS)}")
    recipe = {
        "version": RECIPE_VERSION,
        "train_per_task": train_per_task,
        "val_per_task": val_per_task,
        "tasks": names,
        "seed": seed,
    }
    marker = folder / "recipe.json"
    if marker.is_file() and json.loads(marker.read_text()) == recipe:
        return folder
    counts = {
        "train": {n: train_per_task * TASKS[n].train_share for n in names},
        "val": dict.fromkeys(names, val_per_task),
    }
    total = sum(sum(per_task.values()) for per_task in counts.values())
    logger.info("drawing %d synthetic records into %s", total, folder)
    marker.unlink(missing_ok=True)
    (folder / "media").mkdir(parents=True, exist_ok=True)
    for split, per_task in counts.items():
        records = [record for name in names for record in _records(folder, TASKS[name], split, per_task[name], seed)]
        write_lines(folder / f"{split}.jsonl", records)
    # Last, so that an interrupted build is not taken for a finished one.
    write_json(marker, recipe)
    return folder


def synthetic_corpus() -> list[str]:
    """Texts on which the tiny tokenizer is trained: every question, the times in prompts, typical answers."""
    templates = PromptTemplates("tiny")
    texts = []
    for name in TASKS:
        for _, record in _drawn(TASKS[name], "train", 10, 0):
            texts.append(templates.render(to_sample({**record, "data_type": None})))
            texts.append(f"<answer>{record['answer']}</answer>")
    texts += [f"<{second}.{part} seconds>" for second in range(NUM_PATCHES) for part in (2, 8)] * 4
    texts += ["user\n", "assistant\n", "yes", "no"] * 4
    return texts


def _records(folder: Path, task: Task, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    records = []
    for number, (drawing, record) in enumerate(_drawn(task, split, count, seed)):
        stem = f"media/{task.name}_{split}_{number:04d}"
        if drawing is not None and task.data_type == "video":
            record["videos"] = [f"{stem}.mp4"]
            encode_video(folder / record["videos"][0], drawing)
        elif drawing is not None:
            record["images"] = [f"{stem}.png"]
            Image.fromarray(drawing).save(folder / record["images"][0])
        record["problem_id"] = f"{split}-{number}"
        records.append(record)
    return records


def _drawn(task: Task, split: str, count: int, seed: int) -> Iterator[tuple[np.ndarray | None, dict[str, Any]]]:
    """Drawings with complete records, media not yet written."""
    stream = list(TASKS).index(task.name)
    fields = {"data_type": task.data_type, "problem_type": task.problem_type, "data_source": task.name}
    if task.draw is None:
        rng = np.random.default_rng([seed, stream])
        for question in _split_questions(rng, split, count):
            yield None, {**fields, **question}
        return
    rng = np.random.default_rng([seed, stream, 0 if split == "train" else 1])
    for number in range(count):
        drawing, record = task.draw(rng, number)
        yield drawing, {**fields, **record}


def encode_video(path: Path, frames: np.ndarray, fps: float = FPS, **options: str) -> None:
    """Write uint8 [T, H, W, 3] frames as an H.264 file.

    Args:
        path: target; the extension chooses the container.
        frames: RGB; height and width must be even.
        fps: frames per second.
        options: further x264 options (`bf`, `g`, ...).
    """
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(10000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # Lossless: the encoder's decisions vary with timing now and then, the decoded pixels must not.
        stream.codec_context.thread_count = 1
        stream.options = {"qp": "0", "preset": "veryfast", **options}
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _background(rng: np.random.Generator, frames: int) -> np.ndarray:
    base = rng.integers(0, 50, size=3)
    image = base + rng.integers(-8, 9, size=(1, HEIGHT, WIDTH, 1))
    return np.repeat(np.clip(image, 0, 255).astype(np.uint8), frames, axis=0)


def _draw_colour_video(rng: np.random.Generator, number: int) -> Drawing:
    frames = _background(rng, NUM_FRAMES)
    choice = number % len(COLOURS)
    side = int(rng.integers(24, 40))
    top, left = int(rng.integers(0, HEIGHT - side + 1)), int(rng.integers(0, WIDTH - side + 1))
    frames[:, top : top + side, left : left + side] = list(COLOURS.values())[choice]
    return frames, {"problem": "What colour is the square?", "options": OPTIONS, "answer": "ABCD"[choice]}


def _draw_colour_image(rng: np.random.Generator, number: int) -> Drawing:
    frames, record = _draw_colour_video(rng, number)
    return frames[0], {**record, "problem": "Which colour has the square?"}


def _draw_flashes(rng: np.random.Generator, number: int) -> Drawing:
    frames = _background(rng, NUM_FRAMES)
    count = number % NUM_PATCHES + 1
    # A flash lasts one frame and the next is dark again, so neighbouring flashes stay apart.
    for patch in rng.permutation(NUM_PATCHES)[:count]:
        frames[int(patch) * PATCH_FRAMES] = 235
    return frames, {"problem": "How many times does the screen flash?", "answer": str(count)}


def _draw_red_frame(rng: np.random.Generator, number: int) -> Drawing:
    frames = _background(rng, NUM_FRAMES)
    others = [colour for name, colour in COLOURS.items() if name != "red"]
    for patch in range(NUM_PATCHES):
        frames[patch * PATCH_FRAMES : (patch + 1) * PATCH_FRAMES] = others[int(rng.integers(len(others)))]
    red = number % 2 == 0
    if red:
        patch = int(rng.integers(NUM_PATCHES))
        frames[patch * PATCH_FRAMES : (patch + 1) * PATCH_FRAMES] = COLOURS["red"]
    return frames, {"problem": "Is there a red frame, yes or no?", "answer": "yes" if red else "no"}


def _draw_circle_time(rng: np.random.Generator, number: int) -> Drawing:
    frames = _background(rng, NUM_FRAMES)
    # One or two seconds: among longer spans a constant answer in the middle overlaps so well that it looks like a goal.
    spans = [(a, b) for a in range(NUM_PATCHES) for b in range(a + 1, min(a + 2, NUM_PATCHES) + 1)]
    start, end = spans[number % len(spans)]
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    radius = int(rng.integers(16, 26))
    centre = int(rng.integers(radius, HEIGHT - radius + 1)), int(rng.integers(radius, WIDTH - radius + 1))
    disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 <= radius**2
    frames[start * PATCH_FRAMES : end * PATCH_FRAMES, disc] = (240, 240, 240)
    return frames, {
        "problem": "When is the circle visible? Give [start, end] in seconds.",
        "answer": f"[{start}, {end}]",
    }


def _split_questions(rng: np.random.Generator, split: str, count: int) -> list[dict[str, str]]:
    """`count` questions of a split; a quarter of all ordered digit triples is held out."""
    triples = [(a, b, c) for a in range(10) for b in range(10) for c in range(10) if len({a, b, c}) == 3]
    order = rng.permutation(len(triples))
    held_out = len(triples) // 4
    chosen = order[held_out:] if split == "train" else order[:held_out]
    if split != "train" and count > held_out:
        raise ValueError(f"only {held_out} text questions are held out, {count} wanted")
    picked = [triples[int(chosen[i % len(chosen)])] for i in range(count)]
    return [
        {"problem": f"Which digit is the largest: {a}, {b} or {c}?", "answer": str(max(a, b, c))} for a, b, c in picked
    ]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("colour", "multiple choice", "video", _draw_colour_video),
        Task("flashes", "numerical", "video", _draw_flashes),
        Task("red_frame", "boolean", "video", _draw_red_frame),
        Task("circle_time", "temporal grounding", "video", _draw_circle_time, train_share=2),
        Task("image_colour", "multiple choice", "image", _draw_colour_image),
        Task("largest", "numerical", "text"),
    )
}
