"""TempCompass: temporal perception in four task formats (Liu et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from datamodules.records import Record, read_objects
from eval.benchmarks import metrics
from eval.benchmarks.base import Benchmark, Figures, Judged, submit
from eval.benchmarks.drafts import Draft, option_texts, strip_tags
from eval.benchmarks.judged import ask_judge, then
from eval.benchmarks.media import MediaFinder
from eval.benchmarks.source import Source
from eval.benchmarks.types import BenchmarkItem
from rewards.base import Score

if TYPE_CHECKING:
    from rewards.router import RewardRouter

CAPTION_TASK = (
    "Read the description of a video and answer this question from the description alone. The answer to grade is the "
    "description; it is right if it leads to the reference option and to no other.\n"
)
FORMATS = ("multi-choice", "yes_no", "caption_matching", "captioning")


@dataclass(frozen=True, kw_only=True)
class NestedSource(Source):
    """The official repository's files: {video: {dimension: [questions]}}; flat records are taken as they are."""

    def _parts(self, outer: Record) -> Iterable[Record]:
        lists = {key: value for key, value in outer.items() if isinstance(value, list) and value}
        nested = {k: v for k, v in lists.items() if all(isinstance(entry, dict) and "question" in entry for entry in v)}
        if not nested:
            return [outer]
        video = str(outer.get("_key"))
        return [{**q, "video_id": video, "dim": dim} for dim, questions in nested.items() for q in questions]


@dataclass(frozen=True, kw_only=True)
class TempCompass(Benchmark):
    """Accuracy per format, their mean, and the mean over all items; fine aspects where meta_info.json is there.

    Where the official rules find no answer they ask a language model; without one such an answer counts as wrong
    (the official `--disable_llm`). Captions are always judged: the judge answers the multiple-choice question from
    the caption alone.
    """

    def drafts(self, records: Iterable[Record], source: Source, media: MediaFinder) -> Iterable[Draft]:
        """Options stand in the question, one per line; a caption is judged by its video's first choice question."""
        info = media.find("meta_info.json")
        aspects = {entry["_key"]: entry.get("eval_dim") or {} for entry in read_objects(info)} if info else {}
        choices: dict[tuple[str, str], Record] = {}
        for given in records:
            record, kind = given, _format(given)
            place = (str(record["video_id"]), str(record["dim"]))
            if kind == "multi-choice":
                choices.setdefault(place, record)
            elif kind == "captioning" and "mc_question" not in record and place in choices:
                first = choices[place]
                record = {**record, "mc_question": first["question"], "mc_answer": first["answer"]}
            aspect = (aspects.get(place[0], {}).get(place[1]) or {}).get("type", "")
            draft = self.draft({**record, "format": kind, "aspect": aspect}, source, media)
            question, options = str(record["question"]).strip(), tuple[str, ...]()
            if kind in ("multi-choice", "caption_matching"):
                head, *lines = [line.strip() for line in question.splitlines() if line.strip()]
                question, options = head, tuple(lines)
            answer = strip_tags(record.get("mc_answer") if kind == "captioning" else record.get("answer"))
            known = answer in options if options else bool(answer)
            texts = option_texts(list(options)) if kind == "multi-choice" else ()
            raw = options if kind == "caption_matching" else ()
            yield replace(
                draft,
                question=question,
                answer=answer,
                problem_type=kind,
                texts=texts,
                raw_options=raw,
                gold_ok=known,
                needs_judge=kind == "captioning",
                extra={"mc_question": record.get("mc_question")} if kind == "captioning" else {},
            )

    def score(self, item: BenchmarkItem, response: str, router: RewardRouter) -> tuple[Future[Score], Future[Score]]:
        """Rules first, the judge for what they leave open and for captions."""
        sample = item.sample
        if item.needs_judge:
            question = CAPTION_TASK + str(sample.extra["mc_question"])
            verdict = ask_judge(self, item, response, router, sample.answer, question)
            return verdict, verdict
        robust = submit(self, item, response, router, "robust")
        official = submit(self, item, response, router, "official")
        if official.result().status != "not_judged":
            return official, robust

        def wrong_without_judge(score: Score) -> Score:
            if score.status != "not_judged":
                return score
            return replace(score, status="unparsable", reason="the official rules find no answer and no judge decides")

        question = "\n".join([str(sample.extra["question"]), *sample.options])
        return then(wrong_without_judge, ask_judge(self, item, response, router, sample.answer, question)), robust

    def figures(self, judged: Sequence[Judged]) -> Figures:
        """`mean_of_formats` over the four formats, `micro` over all items, each format, formats by dimension."""
        tables = self.subgroup_tables(judged)
        formats = tables.get("format", {})
        each = {name: formats[name].value for name in FORMATS if name in formats}
        for name in each:
            part = [entry for entry in judged if entry.item.meta.get("format") == name]
            tables[f"{name} by dim"] = metrics.table((entry.item.meta.get("dim"), entry.value) for entry in part)
        micro = metrics.mean(entry.value for entry in judged).value
        unjudged = any(value is None for value in each.values())
        return {"micro": None if unjudged else micro, "mean_of_formats": metrics.mean_of(each.values()), **each}, tables


def _format(record: Record) -> str:
    """The task format that the record names, else its file or folder."""
    place = f"{record['_folder']} {record['_file']}"
    longest_first = sorted(FORMATS, key=len, reverse=True)
    return str(record.get("format") or next((name for name in longest_first if name in place), ""))
