"""Properties that hold for all inputs: bounds, symmetry, monotony, and no text that breaks a scorer."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.base import Query
from rewards.extract import find_boolean, find_box, find_choice, find_interval, find_number, parse_options, read_answer
from rewards.geometry import box_iou, interval_iou, to_pixels
from rewards.router import RewardRouter
from rewards.tasks.numerical import mean_relative_accuracy
from rewards.tasks.ocr import OCR
from rewards.tasks.ordering import Ordering
from rewards.tasks.spatial_temporal import SpatialTemporalGrounding
from rewards.terms import Repetition, SoftOverlong

# No stored examples and no time limit per example: runs are repeatable on a busy machine.
CHECK = settings(deadline=None, database=None)
COORDINATE = st.floats(-1e4, 1e4, allow_nan=False)
INTERVAL = st.tuples(COORDINATE, COORDINATE)
BOX = st.tuples(COORDINATE, COORDINATE, COORDINATE, COORDINATE)
TUBE = st.dictionaries(st.integers(0, 8), st.tuples(*[st.integers(0, 50)] * 4), max_size=6)
ROUTER = RewardRouter()
OPTIONS = ("A. one thing", "B. another", "C. a third")
# Pieces that the extractors look for, so that random texts reach their branches.
WORDS = ["<think>", "</think>", "<answer>", "</answer>", "the answer is ", "A", "B", "(C)", " or ", "yes", "no", "\n"]
SIGNS = [
    " ",
    "\\boxed{",
    "}",
    "3.5",
    "1/2",
    "-",
    " to ",
    "[",
    "]",
    "{",
    '"time": ',
    ",",
    "12",
    "00:10",
    "NaN",
    "是",
    "选",
]
PIECE = st.sampled_from([*WORDS, *SIGNS, "选", "%", "*"])
TEXT = st.one_of(st.text(max_size=80), st.lists(PIECE, max_size=25).map("".join))


@given(INTERVAL, INTERVAL)
@CHECK
def test_interval_iou_is_bounded_and_symmetric(a, b) -> None:
    value = interval_iou(a, b)
    assert 0.0 <= value <= 1.0
    assert value == interval_iou(b, a)
    if a[0] < a[1]:
        assert interval_iou(a, a) == 1.0


@given(BOX, BOX)
@CHECK
def test_box_iou_is_bounded_and_symmetric(a, b) -> None:
    value = box_iou(a, b)
    assert 0.0 <= value <= 1.0
    assert math.isclose(value, box_iou(b, a), rel_tol=1e-9, abs_tol=1e-12)


@given(st.integers(1, 500), st.integers(1, 500), st.tuples(*[st.floats(0, 1000)] * 4))
@CHECK
def test_relative_coordinates_scale_with_the_frame(width, height, box) -> None:
    pixels = to_pixels(box, "relative1000", (width, height))
    unit = to_pixels(tuple(x / 1000 for x in box), "unit", (width, height))
    assert all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(pixels, unit, strict=True))


@given(st.floats(0.01, 1e6), st.floats(0, 2), st.floats(0, 2))
@CHECK
def test_mean_relative_accuracy_falls_with_the_error(gold, error, more) -> None:
    near, far = sorted((error, more))
    for sign in (1, -1):
        assert mean_relative_accuracy(gold * (1 + sign * far), gold) <= mean_relative_accuracy(
            gold * (1 + sign * near), gold
        )
    assert mean_relative_accuracy(gold, gold) == 1.0
    assert 0.0 <= mean_relative_accuracy(gold * (1 + error), gold) <= 1.0


@given(TUBE, TUBE)
@CHECK
def test_mean_iou_over_the_union_is_symmetric_and_never_gains_from_extra_keys(a, b) -> None:
    task = SpatialTemporalGrounding()
    value = task.mean_iou(a, b, {})
    assert 0.0 <= value <= 1.0
    assert math.isclose(value, task.mean_iou(b, a, {}), abs_tol=1e-12)
    assert task.mean_iou({**a, 99: (0, 0, 5, 5)}, b, {}) <= value + 1e-12


@given(st.permutations("ABCDE"))
@CHECK
def test_ordering_and_its_reverse_add_up_to_one(order) -> None:
    def accuracy(sequence) -> float:
        return Ordering().judge(Query("", "A, B, C, D, E", "ordering"), " -> ".join(sequence)).accuracy

    assert math.isclose(accuracy(order) + accuracy(order[::-1]), 1.0)


@given(st.text(min_size=1, max_size=40), st.text(max_size=40))
@CHECK
def test_ocr_is_bounded_and_perfect_on_itself(gold, text) -> None:
    if not OCR()._clean(gold):
        return
    assert 0.0 <= OCR().judge(Query("", gold, "ocr"), text).accuracy <= 1.0
    assert OCR().judge(Query("", gold, "ocr"), gold).accuracy == 1.0


@given(st.integers(0, 300), st.integers(0, 300))
@CHECK
def test_overlong_penalty_is_monotone_and_bounded(a, b) -> None:
    term = SoftOverlong(max_tokens=200, buffer=50)
    short, long = (term(Query("", "", "x", fields={"num_tokens": n})) for n in sorted((a, b)))
    assert -1.0 <= long <= short <= 0.0


@given(st.text(max_size=200))
@CHECK
def test_repetition_penalty_is_bounded(text) -> None:
    assert -0.5 <= Repetition()(Query(text, "", "x")) <= 0.0


@given(TEXT)
@settings(CHECK, max_examples=300)
def test_no_text_breaks_an_extractor(text) -> None:
    answer = read_answer(text)
    assert answer.text == answer.text.strip()
    for find in (find_boolean, find_number, find_interval, find_box):
        value, reason = find(answer.text)
        assert (value is None) == bool(reason)
    label, reason = find_choice(answer.text, parse_options(OPTIONS))
    assert label in ("A", "B", "C", None)
    assert (label is None) == bool(reason)


INLINE = {
    "multiple choice": "B",
    "numerical": "3.5",
    "regression": "4",
    "boolean": "yes",
    "temporal grounding": "[1, 3]",
    "spatial grounding": "[1, 2, 30, 40]",
    "stvg": '{"time": [1, 2], "boxes": {"1": [0, 0, 9, 9]}}',
    "tracking": '{"1": [0, 0, 9, 9]}',
    "ocr": "hello world",
    "open-ended": "a man walks along the street with a dog",
}


@given(st.sampled_from(sorted(INLINE)), TEXT)
@settings(CHECK, max_examples=400)
def test_every_response_ends_in_a_score_within_bounds(kind, text) -> None:
    score = ROUTER.score(response=text, ground_truth=INLINE[kind], problem_type=kind, options=OPTIONS)
    assert score.status in ("ok", "unparsable")
    assert 0.0 <= score.accuracy <= 1.0
    assert score.format in (0.0, 1.0)
    assert math.isclose(score.total, 0.9 * score.accuracy + 0.1 * score.format)
    if score.status == "unparsable":
        assert score.accuracy == 0.0
        assert score.reason
