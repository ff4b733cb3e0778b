"""Grounding benchmarks: Charades-STA (when) and STVG on VidSTG (when and where)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from datamodules.errors import MediaError
from datamodules.records import Record
from datamodules.types import MediaRef
from datamodules.video.probe import probe
from datamodules.video.spec import VideoInfo
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged, submit
from eval.benchmarks.drafts import Draft
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source, fill, lookup
from eval.benchmarks.types import BenchmarkItem
from rewards.base import Score
from rewards.extract.sections import read_answer
from rewards.extract.structured import find_structure
from rewards.geometry import frame_size, interval_iou, to_pixels
from rewards.tasks.spatial_temporal import SpatialTemporalGrounding, read_tube

if TYPE_CHECKING:
    from rewards.router import RewardRouter


@dataclass(frozen=True, kw_only=True)
class CharadesSTA(Benchmark):
    """Temporal grounding of sentences: R1@{0.3, 0.5, 0.7} and mean IoU (Gao et al., 2017).

    The official parser reads "a - b" sentences; where the prompt asks for JSON (styles cot and qwen3vl), its JSON
    form is used.
    """

    thresholds: Sequence[float] = (0.3, 0.5, 0.7)

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """One per sentence; the gold is a list, its text, or `{"time": [start, end]}` inside any text, in seconds."""
        for record in records:
            gold = lookup(record, source.answer)
            if not isinstance(gold, (list, tuple)):
                text = str(gold)
                match = re.search(r"\[\s*([\d.]+)\s*,\s*([\d.]+)\s*\]", text) or re.search(r"([\d.]+)\s+([\d.]+)", text)
                gold = match.groups() if match else ()
            interval = [float(time) for time in gold] if len(gold) == 2 else []
            draft = self.draft(record, source, media)
            yield replace(draft, answer=json.dumps(interval) if interval else "", gold_ok=bool(interval))

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """IoU by the sentence parser, or by the strict JSON parser where the answer is JSON; and the robust IoU."""
        kind = "temporal grounding (json)" if "{" in read_answer(response).text else "temporal grounding"
        return submit(self, item, response, router, "official", problem_type=kind), submit(
            self, item, response, router, "robust"
        )

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """Mean IoU and recall at the thresholds (inclusive), in percent."""
        ious = [entry.value for entry in judged]
        recalls = {f"R1@{t:g}": metrics.recall_at(ious, t) for t in self.thresholds}
        return {"mIoU": metrics.mean(ious).value, **recalls}, self.subgroup_tables(judged)


@dataclass(frozen=True, kw_only=True)
class STVG(Benchmark):
    """Spatio-temporal grounding: m_tIoU, m_vIoU and vIoU@{0.3, 0.5} (Zhang et al., 2020; LLaVA-ST).

    Prompts ask for coordinates from 0 to 1000 relative to the frame; golds are pixels, so the frame's size is read
    from the record or, where it is not there, from the video. vIoU = sum of box IoUs over seconds that both sides
    have, divided by the number of seconds that either side has.
    """

    thresholds: Sequence[float] = (0.3, 0.5)

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """One per question; without a frame size the answer's coordinates are taken as pixels."""
        for record in records:
            if isinstance(record.get("meta"), Mapping):
                yield _official_draft(self, record, source, media)
            else:
                draft = self.draft(record, source, media)
                info = video_info(draft.videos[0].path)
                yield replace(draft, extra=coordinates((info.width, info.height) if info else None))

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """vIoU after converting the answer's boxes to pixels (official), and tIoU and mean IoU (robust)."""
        converted = pixel_answer(response, item.sample.extra)
        official = submit(self, item, converted, router, "official")
        return official, submit(self, item, response, router, "robust")

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """m_tIoU, m_vIoU and vIoU at the thresholds (inclusive), in percent; unreadable answers count 0."""
        pairs = [tube_ious(entry) for entry in judged]
        values = [pair[1] for pair in pairs]
        headline = {"m_vIoU": metrics.mean(values).value, "m_tIoU": metrics.mean(pair[0] for pair in pairs).value}
        headline |= {f"vIoU@{t:g}": metrics.recall_at(values, t) for t in self.thresholds}
        return headline, self.subgroup_tables(judged)


def tube_ious(entry: Judged) -> tuple[float | None, float | None]:
    """(tIoU, vIoU) of one item, both from the response, so that either extraction has both."""
    if entry.value is None:
        return None, None
    if entry.score is None or entry.score.status == "error":
        return 0.0, 0.0
    if "miou" in entry.score.parts:
        return entry.score.parts["tiou"], entry.score.parts["miou"]
    sample = entry.item.sample
    gold_time, gold_boxes = read_tube(find_structure(sample.answer))
    time, boxes = read_tube(find_structure(read_answer(entry.response).text))
    tiou = interval_iou(time, gold_time) if time and gold_time else 0.0
    if not gold_boxes:
        return tiou, entry.value
    return tiou, SpatialTemporalGrounding().mean_iou(boxes, gold_boxes, sample.extra)


def pixel_answer(response: str, fields: Mapping[str, Any]) -> str:
    """The response as JSON with its boxes in pixels; unchanged where it holds no boxes or is in pixels already."""
    if fields.get("answer_coordinates") != "relative1000":
        return response
    time, boxes = read_tube(find_structure(read_answer(response).text))
    if not boxes:
        return response
    size = frame_size(fields)
    pixels = {str(key): list(to_pixels(box, "relative1000", size)) for key, box in boxes.items()}
    return json.dumps({"time": list(time) if time else [], "boxes": pixels})


def video_info(path: str) -> VideoInfo | None:
    """Frames, rate and size of a video; None when it is missing or damaged."""
    try:
        return probe(path)
    except MediaError:
        return None


def _official_draft(benchmark: Benchmark, record: Record, source: Source, media: MediaFinder) -> Draft:
    """An ST-Align record: frame numbers become seconds, boxes (x, y, w, h) per frame become corners per second.

    Without the video the frame rate is unknown, and so is the gold.
    """
    meta = record["meta"]
    video = source.video(record, media)
    info = video_info(video.path)
    question = re.sub(r"<(?:video|image)>\n?", "", str(record["conversations"][0]["value"])).strip()
    gold, start, end = "", None, None
    if info is not None:
        fps = info.fps
        first, last = (float(meta["time_token"][key]) for key in ("<s>", "<e>"))
        start, end = (float(frame) / fps for frame in meta["split"])
        boxes = meta["spatial_token"].get("<bboxes>") or {}
        seconds = range(math.ceil(first / fps), math.floor(last / fps) + 1)
        corners = {
            str(second): [x, y, x + w, y + h]
            for second in seconds
            if (box := boxes.get(str(round(second * fps)))) is not None
            for x, y, w, h in [box]
        }
        gold = json.dumps({"time": [first / fps, last / fps], "boxes": corners})
    return Draft(
        uid=f"{benchmark.name}:{fill(source.uid, record)}",
        question=question,
        answer=gold,
        problem_type=benchmark.problem_type,
        videos=(MediaRef(video.path, start, end),),
        meta=record,
        extra=coordinates((int(meta["width"]), int(meta["height"]))),
        gold_ok=bool(gold),
    )


def coordinates(size: tuple[int, int] | None) -> dict[str, Any]:
    """What the scorer has to know about boxes: golds are pixels, answers 0 to 1000 where the frame size is known."""
    if size is None:
        return {"gold_coordinates": "pixel", "answer_coordinates": "pixel"}
    return {"gold_coordinates": "pixel", "answer_coordinates": "relative1000", "width": size[0], "height": size[1]}
