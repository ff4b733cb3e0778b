"""The control that swaps media: what an answer that follows the picture earns on the wrong picture."""

from __future__ import annotations

import ast
import itertools
from statistics import mean

import pytest

from datamodules.types import MediaRef, Sample
from lightning_modules.launch.held_out import with_swapped_media


def _sample(uid: str, answer: str, source: str = "when") -> Sample:
    videos = (MediaRef(f"{uid}.mp4"),)
    return Sample(uid, "When?", answer, "temporal grounding", "video", videos=videos, data_source=source)


def test_every_sample_gets_the_media_of_another_answer_of_its_source():
    samples = [_sample(f"{s}{i}", "AB"[i % 2], source=s) for s in ("x", "y") for i in range(10)]
    swapped = with_swapped_media(samples)
    answer_of = {sample.videos: (sample.data_source, sample.answer) for sample in samples}
    assert [(s.uid, s.answer) for s in swapped] == [(s.uid, s.answer) for s in samples]
    assert all(answer_of[s.videos] == (s.data_source, "BA"["AB".index(s.answer)]) for s in swapped)
    assert with_swapped_media(samples) == swapped
    alone = [_sample("z", "C", source="z")]
    assert with_swapped_media(alone) == alone


def test_answers_in_a_pattern_do_not_help_the_wrong_picture():
    # Neighbours overlap by half: the next sample's interval would earn about 0.44.
    spans = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4)]
    samples = [_sample(str(i), str(span)) for i, span in enumerate(itertools.islice(itertools.cycle(spans), 210))]
    span_of = {sample.videos: ast.literal_eval(sample.answer) for sample in samples}
    seen = mean(_tiou(span_of[s.videos], ast.literal_eval(s.answer)) for s in with_swapped_media(samples))
    pairs = mean(_tiou(a, b) for a in spans for b in spans if a != b)
    assert seen == pytest.approx(pairs, abs=0.06)
    assert pairs < 0.2


def _tiou(a: tuple[int, int], b: tuple[int, int]) -> float:
    inter = max(0, min(a[1], b[1]) - max(a[0], b[0]))
    return inter / (a[1] - a[0] + b[1] - b[0] - inter)
