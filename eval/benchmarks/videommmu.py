"""Video-MMMU: three tracks of knowledge acquisition from lectures (Hu et al., 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datamodules.common.files import write_whole
from datamodules.records import Record
from datamodules.types import MediaRef
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged
from eval.benchmarks.drafts import Draft, gold_of
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source, lookup

TRACKS = ("Perception", "Comprehension", "Adaptation")


@dataclass(frozen=True, kw_only=True)
class VideoMMMU(Benchmark):
    """Mean accuracy of the three tracks; Adaptation shows an image behind the video.

    `with_video=False` is the question-only run on Adaptation that the knowledge gain needs:
    `metrics.delta_knowledge(question_only, adaptation)`.
    """

    disciplines: Mapping[str, Sequence[str]]
    """Discipline -> its subjects; an id such as "dev_Biology_3" holds the subject."""
    with_video: bool = True
    """Whether the video is shown; without it only the image and the question are."""
    image_folder: str = "images"
    """Where images that are stored inside of Parquet files are written, below the benchmark's folder."""

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """Open questions ask for a number or a few words; images come from the record or from a file."""
        for number, record in enumerate(records):
            identifier = str(record.get("id") or Path(str(record.get("path", ""))).stem)
            # The reference's file holds 300 of each, Adaptation first.
            place = f"{record.get('track', '')} {record.get('_file', '')} {record.get('_folder', '')}".lower()
            named = next((track for track in TRACKS if track.lower() in place), None)
            track = named or ("Adaptation", "Comprehension", "Perception")[min(number // 300, 2)]
            subject = "_".join(identifier.split("_")[1:-1])
            discipline = next((name for name, subjects in self.disciplines.items() if subject in subjects), "")
            meta = {**record, "id": identifier, "track": track, "discipline": discipline}
            draft = self.draft(meta, source, media)
            kind = str(record.get("question_type") or record.get("original_question_type") or "")
            if not any(draft.texts) or kind.startswith("open"):
                answer, known = gold_of(lookup(record, source.answer))
                kind = "numerical" if re.fullmatch(r"-?[\d.,]+", answer) else "open-ended"
                draft = replace(draft, texts=(), answer=answer, gold_ok=known, problem_type=kind)
            images: tuple[MediaRef, ...] = ()
            picture = record.get("image") if track == "Adaptation" else None
            held = picture if isinstance(picture, dict) else {}
            name = record.get("image_path") or (held.get("path") if held else picture)
            if held.get("bytes"):
                path = media.folders[0] / self.image_folder / f"{identifier}.png"
                _store(path, held["bytes"])
                images = (MediaRef(str(path)),)
            elif track == "Adaptation" and name:
                images = (MediaRef(media.place([str(name), f"{self.image_folder}/{Path(str(name)).name}"])),)
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

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`overall` = mean of the tracks."""
        tables = self.subgroup_tables(judged)
        tracks = tables.get("track", {})
        present = {name: tracks[name].value for name in TRACKS if name in tracks}
        return {"overall": metrics.mean_of(present.values()), **present}, tables


def _store(path: Path, data: bytes) -> None:
    """Write the picture of a Parquet file beside the videos, once, so that it is read like any other image."""
    try:
        if not path.is_file():
            write_whole(path, [data])
    except OSError as error:
        raise ValueError(f"pictures of the Parquet files are kept in {path.parent}, which failed: {error}") from error
