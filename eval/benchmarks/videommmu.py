"""Video-MMMU: three tracks of knowledge acquisition from lectures (Hu et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datamodules.common.files import write_whole
from datamodules.types import MediaRef
from eval.benchmarks import loading, metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.drafts import Draft
from eval.benchmarks.readers import Record, lookup
from eval.benchmarks.source import Source
from eval.benchmarks.types import Summary

_DISCIPLINES = {
    "Art": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities": ("History", "Literature", "Sociology", "Psychology"),
    "Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
TRACKS = ("Perception", "Comprehension", "Adaptation")


@dataclass(frozen=True, kw_only=True)
class VideoMMMU(Benchmark):
    """Mean accuracy of the three tracks; Adaptation shows an image behind the video.

    `with_video=False` is the question-only run on Adaptation that the knowledge gain needs:
    `metrics.delta_knowledge(question_only, adaptation)`.
    """

    with_video: bool = True
    """Whether the video is shown; without it only the image and the question are."""
    image_folder: str = "images"
    """Where images that are stored inside of Parquet files are written, below the benchmark's folder."""

    def drafts(self, records: Iterable[Record], source: Source, media: loading.MediaFinder) -> Iterable[Draft]:
        """Open questions ask for a number or a few words; images come from the record or from a file."""
        for number, record in enumerate(records):
            identifier = str(record.get("id") or Path(str(record.get("path", ""))).stem)
            track = _track(record, number)
            meta = {**record, "id": identifier, "track": track, "discipline": discipline(identifier)}
            draft = loading.plain_draft(self, meta, source, media)
            kind = str(record.get("question_type") or record.get("original_question_type") or "")
            if not any(draft.texts) or kind.startswith("open"):
                answer, known = loading.gold_of(lookup(record, source.answer), (), "plain")
                kind = "numerical" if re.fullmatch(r"-?[\d.,]+", answer) else "open-ended"
                draft = replace(draft, texts=(), answer=answer, gold_ok=known, problem_type=kind)
            images = self._images(record, identifier, media) if track == "Adaptation" else ()
            hint = "The image for this question is at the end of the video." if images else ""
            question = re.sub(r"<image 1>\s*", "", draft.question).strip() if images else draft.question
            yield replace(
                draft,
                question=question,
                videos=draft.videos if self.with_video else (),
                images=images,
                meta={**meta, "image": None},  # bytes of the picture do not belong into records
                extra={"image_hint": hint, "track": track},
            )

    def _images(self, record: Record, identifier: str, media: loading.MediaFinder) -> tuple[MediaRef, ...]:
        image = record.get("image")
        if isinstance(image, dict) and image.get("bytes"):
            return (MediaRef(str(_stored(image, media.folders[0] / self.image_folder / f"{identifier}.png"))),)
        name = record.get("image_path") or (image.get("path") if isinstance(image, dict) else image)
        if not name:
            return ()
        return (MediaRef(media.place([str(name), f"{self.image_folder}/{Path(str(name)).name}"])),)

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`overall` = mean of the tracks."""
        tables = self.subgroup_tables(judged)
        tracks = tables.get("track", {})
        present = {name: tracks[name].value for name in TRACKS if name in tracks}
        return {"overall": metrics.mean_of(present.values()), **present}, tables


def knowledge_gain(question_only: Summary, with_video: Summary) -> float | None:
    """Delta knowledge in percent from a run of `videommmu_question_only` and one of `videommmu`; None without both."""
    before, after = question_only.headline.get("Adaptation"), with_video.headline.get("Adaptation")
    return None if before is None or after is None else metrics.delta_knowledge(before, after)


def discipline(identifier: str) -> str:
    """Discipline of an id such as "dev_Biology_3"; "" when it names no known subject."""
    subject = "_".join(identifier.split("_")[1:-1])
    return next((name for name, subjects in _DISCIPLINES.items() if subject in subjects), "")


def _track(record: Record, number: int) -> str:
    """Track of a record: its file's or field's name; the reference's file holds 300 of each, Adaptation first."""
    place = f"{record.get('track', '')} {record.get('_file', '')} {record.get('_folder', '')}"
    named = next((track for track in TRACKS if track.lower() in place.lower()), None)
    return named or ("Adaptation", "Comprehension", "Perception")[min(number // 300, 2)]


def _stored(image: dict[str, Any], path: Path) -> Path:
    """Write the picture of a Parquet file beside the videos, once, so that it is read like any other image."""
    if path.is_file():
        return path
    try:
        write_whole(path, [image["bytes"]])
    except OSError as error:
        raise ValueError(f"pictures of the Parquet files are kept in {path.parent}, which failed: {error}") from error
    return path
