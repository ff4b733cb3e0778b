"""Gradings with several calls of the judge: MLVU's generation tasks and VCR-Bench's reasoning steps, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.benchmarks import catalogue
from eval.benchmarks.comparison import summarise
from eval.benchmarks.loading import load
from eval.benchmarks.rubric import steps
from eval.benchmarks.types import BenchmarkItem, ScoredItem
from rewards.base import Score
from rewards.router import RewardRouter
from tests.eval_helpers import write_json
from tests.test_rewards_judge import ScriptedServer, judge, server  # noqa: F401 - a fixture


def replies(*scores: float) -> list[tuple[int, str]]:
    return [(200, f'{{"reason": "because", "score": {score}}}') for score in scores]


def ask(name: str, entry: BenchmarkItem, response: str, server: ScriptedServer) -> Score:  # noqa: F811
    with RewardRouter(judge=judge(server, attempts=1)) as router:
        official, _ = catalogue.get(name).score(entry, response, router)
        return official.result(timeout=120)


@pytest.fixture
def generation(tmp_path: Path) -> dict[str, BenchmarkItem]:
    sub_scene = {"video": "s.mp4", "question": "What does the boy do?", "answer": "He digs and finds a box."}
    write_json(
        tmp_path / "mlvu" / "json" / "8_sub_scene.json", [{**sub_scene, "scoring_points": ["He digs.", "A box."]}]
    )
    summary = {"video": "t.mp4", "question": "Summarise the video.", "answer": "A boy finds a box and opens it."}
    write_json(tmp_path / "mlvu" / "json" / "9_summary.json", [summary])
    return {entry.meta["task"]: entry for entry in load(catalogue.get("mlvu_generation"), tmp_path)[0]}


def test_generation_tasks_of_mlvu_by_hand(server: ScriptedServer, generation: dict[str, BenchmarkItem]) -> None:  # noqa: F811
    # Scoring points 1 and 0.5: accuracy 1 + 4 * 0.75 = 4; relevance 1 + 4 * 0.75 = 4; 8 of 10 points.
    server.replies = replies(1, 0.5, 0.75)
    scene = ask("mlvu_generation", generation["sub_scene"], "He digs up something.", server)
    assert scene.parts == {"accuracy": 4.0, "relevance": 4.0}
    assert scene.accuracy == pytest.approx(0.8)
    asked = [request["messages"] for request in server.requests]
    assert ['"He digs."' in a[1]["content"] for a in asked] == [True, False, False]
    assert '"A box."' in asked[1][1]["content"]
    assert "one scoring point" in asked[0][0]["content"]
    assert "keeps to its question" in asked[2][0]["content"]
    # Completeness 2, reliability 5: 7 of 10.
    server.replies = replies(0.25, 1)
    summary = ask("mlvu_generation", generation["summary"], "A boy digs.", server)
    assert summary.parts == {"completeness": 2.0, "reliability": 5.0}

    benchmark = catalogue.get("mlvu_generation")
    done = [ScoredItem(generation[task], "ok", s, s) for task, s in (("sub_scene", scene), ("summary", summary))]
    found = summarise(benchmark, done)
    assert found.headline == {"G-Avg": pytest.approx(7.5), "sub_scene": pytest.approx(8), "summary": pytest.approx(7)}
    assert found.tables["criteria"]["relevance"].value == 4.0
    # An item without an answer counts 0: sub_scene (8 + 0) / 2 = 4, G-Avg (4 + 7) / 2.
    worse = summarise(benchmark, [*done, ScoredItem(generation["sub_scene"], "failed")])
    assert worse.headline["G-Avg"] == pytest.approx(5.5)


def test_without_a_judge_or_with_a_silent_one_generation_is_not_judged(
    server: ScriptedServer,  # noqa: F811
    generation: dict[str, BenchmarkItem],
) -> None:
    benchmark, entry = catalogue.get("mlvu_generation"), generation["summary"]
    with RewardRouter() as plain:
        nobody = benchmark.score(entry, "A boy digs.", plain)[0].result(timeout=120)
        empty = benchmark.score(entry, "<think>hm</think>", plain)[0].result(timeout=120)
    assert (nobody.status, benchmark.state(entry, nobody, nobody)) == ("not_judged", "not_judged")
    assert benchmark.state(entry, empty, empty) == "unparsed"
    server.replies = [*replies(1), (200, "no idea")]
    half = ask("mlvu_generation", entry, "A boy digs.", server)
    assert half.status == "not_judged"
    assert "the judge failed on reliability" in half.reason
    assert summarise(benchmark, [ScoredItem(entry, "not_judged", half, half)]).headline["G-Avg"] is None


def test_steps_of_vcr_bench_by_hand(tmp_path: Path, server: ScriptedServer) -> None:  # noqa: F811
    record = {"id": 0, "question": "When does it fall?", "answer": "[10, 20]", "choices": None, "video_path": "a.mp4"}
    record |= {"dimension": "TSG", "duration": 40, "reasoning": "1. The cup stands at 0:05.\n2. It falls at 0:10."}
    write_json(tmp_path / "vcrbench" / "meta_info.json", [record])
    benchmark = catalogue.get("vcrbench_steps")
    (entry,) = load(benchmark, tmp_path)[0]
    # Recall: one of two steps. Precision: right, wrong, redundant (not counted), right: two of three.
    server.replies = replies(1, 0, 1, 0, 0.5, 1)
    response = "Step 1: The cup stands at 0:05.\nStep 2: The dog barks.\nThe question asks for a time.\n[10, 20]"
    score = ask("vcrbench_steps", entry, response, server)
    assert (score.accuracy, score.status) == (1.0, "ok")  # the interval is compared by rule
    assert score.parts["recall"] == 0.5
    assert score.parts["precision"] == pytest.approx(2 / 3)
    contents = [request["messages"][1]["content"] for request in server.requests]
    assert '"reference_answer": "It falls at 0:10."' in contents[1]
    assert '"answer_to_grade": "The dog barks."' in contents[3]
    other = Score(0.0, 0.0, 0.0, parts={"recall": 1.0, "precision": 1.0})
    found = summarise(benchmark, [ScoredItem(entry, "ok", score, score), ScoredItem(entry, "ok", other, other)])
    assert found.headline["accuracy"] == 50.0
    assert found.headline["recall"] == 75.0
    assert found.headline["precision"] == pytest.approx(250 / 3)
    assert found.headline["f1"] == pytest.approx(2 * 75 * (250 / 3) / (75 + 250 / 3))
    # A failed item has none of the reference's steps and none of its own.
    failed = summarise(benchmark, [ScoredItem(entry, "ok", other, other), ScoredItem(entry, "failed")])
    assert (failed.headline["recall"], failed.headline["precision"]) == (50.0, 100.0)


def test_a_judge_that_fails_on_a_step_leaves_the_verdict_on_the_answer(tmp_path: Path, server: ScriptedServer) -> None:  # noqa: F811
    record = {"id": 0, "question": "When?", "answer": "[10, 20]", "choices": None, "video_path": "a.mp4"}
    write_json(tmp_path / "vcrbench" / "meta_info.json", [{**record, "reasoning": "It falls."}])
    benchmark = catalogue.get("vcrbench_steps")
    (entry,) = load(benchmark, tmp_path)[0]
    server.replies = [(429, "slow down")]
    score = ask("vcrbench_steps", entry, "It falls.\n[10, 20]", server)
    assert (score.accuracy, dict(score.parts).keys() & {"recall", "precision"}) == (1.0, set())
    found = summarise(benchmark, [ScoredItem(entry, "ok", score, score)])
    assert (found.headline["accuracy"], found.headline["recall"], found.headline["f1"]) == (100.0, None, None)


def test_steps_of_a_reasoning() -> None:
    assert steps("1. A man enters.\n\n  2) He sits.") == ["A man enters.", "He sits."]
    assert steps("['one', 'two']") == ["one", "two"]
    assert steps(["Step 1: one", "- two"]) == ["one", "two"]
    assert steps("**Step 3:** He leaves at 0:10.") == ["He leaves at 0:10."]
    assert steps("12 men enter.") == ["12 men enter."]
    assert steps("[10, 20] is the answer") == ["[10, 20] is the answer"]
    assert steps(None) == []
    assert len(steps("\n".join(f"line {i}" for i in range(50)))) == 35
