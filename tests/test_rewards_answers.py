"""Answers of every kind with the score that a careful person gives, and records that no scorer may trip over."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from rewards.base import Query
from rewards.pool import ScoringPool
from rewards.router import RewardRouter
from rewards.score import main
from rewards.tasks.code import Code
from rewards.terms import SoftOverlong

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("rewards_answers.jsonl").read_text(encoding="utf-8").splitlines()
]
TRAPS = [
    *[None, "", [], {}, float("nan"), float("inf"), True, b"\xff", {"time": None}, {"a": {"b": [1]}}, "\ud800"],
    *[{("a", 1): 2}, 10**400, "1/0", "[1,", threading.Lock()],
]
OPTIONS = [None, [], ["A"], ["A. x"] * 5, [f"o{i}" for i in range(1000)], {"A": None}, [None, 1], "AB", 5, float("nan")]
FIELDS = [
    *[{"width": 0, "height": -1}, {"answer_coordinates": "relative1000", "gold_coordinates": "unit"}, {"tests": 5}],
    *[{"tests": {"inputs": 5}}, {"meta": 5, "image_size": 5}, {"style": "no such"}, {"lock": threading.Lock()}],
]


@pytest.fixture(scope="module")
def router():
    with RewardRouter() as router:
        yield router


def test_scores_equal_those_of_a_careful_person(router: RewardRouter) -> None:
    pending = [router.submit(**{k: v for k, v in case.items() if k != "score"}) for case in CASES]
    wrong = [
        (case["problem_type"], case["response"], case["ground_truth"], score.accuracy, score.reason)
        for case, score in zip(CASES, (future.result() for future in pending), strict=True)
        if abs(score.accuracy - case["score"]) > 1e-5 or not score.has_verdict
    ]
    assert not wrong
    kinds = Counter(case["problem_type"] for case in CASES)
    assert len(CASES) > 1000
    assert min(kinds[name] for name in ("multiple choice", "numerical", "boolean", "temporal grounding")) > 140


def test_no_record_stops_the_scoring_of_the_others(router: RewardRouter) -> None:
    """Whatever a record holds: a score within bounds, and no accuracy without a verdict."""
    pending = []
    for name in router.tasks:
        base = {"response": "<answer>A</answer>", "ground_truth": "A", "problem_type": name}
        pending += [router.submit(**{**base, "ground_truth": trap, "options": ["A. x", "B. y"]}) for trap in TRAPS]
        pending += [router.submit(**{**base, "response": trap}) for trap in TRAPS]
        pending += [router.submit(**base, options=options) for options in OPTIONS]
        pending += [router.submit(**{**base, "ground_truth": "[1, 2, 3, 4]"}, **fields) for fields in FIELDS]
    for future in pending:
        score = future.result(timeout=120)
        assert 0.0 <= score.accuracy <= 1.0
        assert score.format in (0.0, 1.0)
        assert score.accuracy == 0.0 or score.status == "ok"
        assert (score.status == "ok") or score.reason


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_gold_is_an_error_and_never_the_word_for_it(router: RewardRouter, missing: object) -> None:
    for kind in ("open-ended", "math", "ocr", "numerical", "multiple choice", "boolean", "stvg"):
        score = router.score(response=f"<answer>{missing}</answer>", ground_truth=missing, problem_type=kind)
        assert (score.accuracy, score.status) == (0.0, "error")


def test_a_term_that_cannot_read_the_record_costs_this_verdict_only() -> None:
    router = RewardRouter(terms={"overlong": SoftOverlong(max_tokens=10, buffer=5)})
    score = router.score(response="3", ground_truth="3", problem_type="numerical", num_tokens="many")
    assert (score.total, score.status) == (0.0, "error")
    assert "overlong" in score.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_masks_its_group_and_is_named(value: float) -> None:
    router = RewardRouter(terms={"bonus": lambda query: value})
    score = router.score(response="<answer>3</answer>", ground_truth="3", problem_type="numerical")
    assert (score.total, score.status, score.has_verdict) == (0.0, "error", False)
    assert score.reason == f"reward part 'bonus' is {value}"


def test_records_from_the_shell_with_clashing_names_and_broken_text(tmp_path: Path) -> None:
    lines = [
        '{"response": "3", "ground_truth": 3, "problem_type": "numerical", "self": 1, "router": 2, "query": 3}',
        '{"response": null, "ground_truth": null, "problem_type": "math"}',
        '{"response": "\\ud800", "ground_truth": "\\ud800", "problem_type": "ocr", "id": "\\ud800"}',
    ]
    source, out = tmp_path / "records.jsonl", tmp_path / "scores.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    assert main([str(source), "--out", str(out)]) == 0
    scores = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [score["accuracy"] for score in scores] == [1.0, 0.0, 1.0]
    assert main([str(source), "no_such_setting=3"]) == 2


def test_a_pool_that_is_closed_while_it_starts_leaves_no_process() -> None:
    before = threading.enumerate()
    pool = ScoringPool({"code": Code()}, workers=2)
    waiting = pool.submit("code", Query("", "1", "code"), "print(1)", 5.0)
    pool.close()
    assert waiting.result(timeout=120).status in ("error", "ok")
    assert not pool.pids
    assert not [thread for thread in threading.enumerate() if thread.name == "worker-pool" and thread not in before]
