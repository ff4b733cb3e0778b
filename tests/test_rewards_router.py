"""The router: names, errors, totals, terms, configuration, the shell command and the speed it promises."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from rewards.base import Query
from rewards.official import judge_official, official_benchmarks
from rewards.router import RewardRouter, default_routes
from rewards.score import main, score_arguments
from rewards.tasks.boolean import Boolean
from rewards.tasks.multiple_choice import MultipleChoice
from rewards.terms import LengthBand, Repetition, SoftOverlong

ROOT = Path(__file__).resolve().parents[1]

# Every problem type of the reference's table and of the benchmarks, as data sets spell them.
SPELLINGS = [
    *["multiple choice", "multiple-choice", "Multi-Choice", "numerical", "regression", "temporal grounding"],
    *["spatial-temporal grounding", "tracking", "spatial grounding", "open-ended", "video QA", "video description"],
    *[
        "free-form",
        "math",
        "OCR",
        "boolean",
        "binary classification",
        "code",
        "SVG",
        "HTML",
        "LLaVA critic",
        "preference",
    ],
    *["REC", "SSR", "CRR", "yes_no", "caption_matching", "captioning"],
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_problem_type_has_a_route(spelling: str) -> None:
    assert RewardRouter().type_name(spelling) in default_routes()


def test_an_unknown_type_is_an_error_with_the_nearest_names() -> None:
    router = RewardRouter()
    with pytest.raises(ValueError, match=r"unknown problem_type 'mutiple choise': did you mean 'multiple choice'"):
        router.score(response="B", ground_truth="B", problem_type="mutiple choise")
    with pytest.raises(ValueError, match="did you mean Video-MME"):
        router.score(response="B", ground_truth="B", problem_type="mcq", mode="official", benchmark="VideoMM")
    with pytest.raises(ValueError, match="needs `benchmark`"):
        router.score(response="B", ground_truth="B", problem_type="mcq", mode="official")
    with pytest.raises(ValueError, match="use 'robust' or 'official'"):
        router.score(response="B", ground_truth="B", problem_type="mcq", mode="strict")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="accuracy_weight=-1"):
        RewardRouter(accuracy_weight=-1)
    with pytest.raises(ValueError, match="style='chatty': use one of auto, thinking, direct"):
        RewardRouter(style="chatty")
    with pytest.raises(ValueError, match="'yes-no' belongs to both 'a' and 'b'"):
        RewardRouter({"a": Boolean(aliases=["yes no"]), "b": MultipleChoice(aliases=["yes-no"])})
    with pytest.raises(ValueError, match="buffer=0"):
        SoftOverlong(max_tokens=10, buffer=0)
    with pytest.raises(ValueError, match="low <= high"):
        LengthBand(low=5, high=4)


def test_totals_and_terms() -> None:
    terms = {"overlong": SoftOverlong(max_tokens=100, buffer=20, weight=0.5), "repetition": Repetition(ngram=2)}
    router = RewardRouter(accuracy_weight=0.8, format_weight=0.2, terms=terms)
    record = {"ground_truth": "B", "problem_type": "multiple choice", "options": ["A. x", "B. y"]}
    score = router.score(response="<answer>B</answer>", num_tokens=90, **record)
    assert score.parts["overlong"] == pytest.approx(-0.25)  # half way through the buffer, half weight
    assert score.total == pytest.approx(0.8 + 0.2 - 0.25 + score.parts["repetition"])
    assert SoftOverlong(100, 20)(Query("", "", "x", fields={"num_tokens": 80})) == 0.0
    assert SoftOverlong(100, 20)(Query("", "", "x", fields={"num_tokens": 500})) == -1.0
    assert Repetition(ngram=1, weight=1.0)(Query("a b a b", "", "x")) == -0.5
    assert Repetition(ngram=2)(Query("a b c d", "", "x")) == 0.0
    assert LengthBand(2, 3, weight=0.1)(Query("a b", "", "x")) == 0.1
    assert LengthBand(2, 3)(Query("a b c d", "", "x")) == 0.0


def test_a_gold_in_answer_tags_is_unwrapped() -> None:
    score = RewardRouter().score(
        response="B", ground_truth="<answer>B</answer>", problem_type="mcq", options=["A. x", "B. y"]
    )
    assert score.accuracy == 1.0


def test_options_by_letter_and_a_missing_response() -> None:
    record = {"ground_truth": "B", "problem_type": "mcq", "options": {"A": "red", "B": "blue"}}
    assert RewardRouter().score(response="blue", **record).accuracy == 1.0
    assert RewardRouter().score(response=None, **record).status == "unparsable"


def load(name: str, *overrides: str) -> RewardRouter:
    with initialize_config_dir(str(ROOT / "conf" / "reward"), version_base=None):
        return instantiate(compose(name, overrides=list(overrides)), _convert_="all")


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "reward").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_reward_configuration_builds(path: Path) -> None:
    needed = ["judge.backend.base_url=http://127.0.0.1:1/v1", "judge.backend.model=m"] if path.stem == "judge" else []
    router = load(path.stem, *needed)
    assert set(default_routes()) <= set(router.tasks)
    if path.stem == "judge":
        assert router.tasks["open ended"].judge_model is router.tasks["preference"].judge_model is not None


def test_one_file_and_one_yaml_add_a_type() -> None:
    record = {"response": "<answer>B -> A -> C</answer>", "ground_truth": "A, B, C", "problem_type": "event order"}
    score = load("ordering").score(**record)
    assert (score.accuracy, score.format) == (pytest.approx(2 / 3), 1.0)
    assert load("ordering").score(**{**record, "response": "B, A"}).status == "unparsable"
    with pytest.raises(ValueError, match="unknown problem_type"):
        load("default").score(**record)


def test_the_default_router_equals_its_configuration() -> None:
    built, bare = load("default"), RewardRouter()
    for setting in ("accuracy_weight", "format_weight", "style", "terms", "_workers", "_memory_mb", "_num_threads"):
        assert getattr(built, setting) == getattr(bare, setting)
    assert {name: vars(task) for name, task in built.tasks.items()} == {n: vars(t) for n, t in bare.tasks.items()}


def test_a_router_survives_pickling() -> None:
    with RewardRouter() as router:
        router.warm_up()
        copy = pickle.loads(pickle.dumps(router))
    assert copy.score(response="yes", ground_truth="yes", problem_type="boolean").accuracy == 1.0


def test_the_same_scorer_in_both_modes_differs_where_the_benchmark_errs() -> None:
    router = RewardRouter()
    record = {"ground_truth": "C", "problem_type": "mcq", "options": [f"{x}. {x}{x}" for x in "ABCD"]}
    text = "Both clips show it; the answer is C."
    assert router.score(response=text, benchmark="LongVideoBench", **record).accuracy == 1.0
    assert router.score(response=text, benchmark="LongVideoBench", mode="official", **record).accuracy == 0.0
    assert len(official_benchmarks()) == 23
    for alias in ("videomme", "mlvu-test", "vidstg", "holmes"):
        assert judge_official(Query("B", "B", "mcq", options=("A. x", "B. y"), benchmark=alias)) is not None


def test_shell_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    records = [
        {"id": 1, "response": "<answer>B</answer>", "answer": "B", "problem_type": "mcq", "options": ["A. x", "B. y"]},
        {"id": 2, "output": "\\boxed{\\frac{2}{4}}", "solution": "<answer>0.5</answer>", "problem_type": "math"},
        {"id": 3, "prediction": "?", "ground_truth": "yes", "problem_type": "boolean"},
    ]
    file.write_text("\n".join(json.dumps(record) for record in records))
    assert main([str(file), "--out", str(tmp_path / "out.jsonl"), "format_weight=0"]) == 0
    scores = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(s["id"], s["accuracy"], s["status"]) for s in scores] == [
        (1, 1.0, "ok"),
        (2, 1.0, "ok"),
        (3, 0.0, "unparsable"),
    ]
    assert [s["total"] for s in scores] == [0.9, 0.9, 0.0]
    table = capsys.readouterr().out
    assert "multiple choice" in table
    assert "0.6667" in table
    file.write_text('{"response": "x"}')
    assert main([str(file)]) == 2
    assert "answers.jsonl:1 has none of the fields ground_truth, answer, solution" in capsys.readouterr().err
    file.write_text("\n{")
    with pytest.raises(ValueError, match=r"answers\.jsonl:2 is not a JSON object: '\{'"):
        list(score_arguments(file))


def test_importing_the_rewards_is_free() -> None:
    """No heavy library comes with the router; scorers import theirs when they first judge."""
    code = "import sys, rewards.router, rewards.judge.client\n"
    code += "from rewards.tasks import code, svg, html, math_answer\n"
    code += "print([m for m in ('torch', 'vllm', 'sympy', 'openai', 'hydra', 'jiwer', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def benchmark_module():
    spec = importlib.util.spec_from_file_location("bench_rewards", ROOT / "scripts" / "bench" / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_many_answers_of_all_lanes_have_one_verdict_each() -> None:
    """The mixture whose rate `scripts/bench/rewards.py` reports."""
    bench = benchmark_module()
    with RewardRouter(workers=2) as router:
        for kind, cases in bench.simple_cases().items():
            assert {router.score(**case).status for case in cases} == {"ok"}, kind
        assert bench.time_mixed(router, 256)[1] == {"ok": 256}


def test_a_term_that_fails_on_a_slow_type_raises_instead_of_hanging() -> None:
    class Broken:
        def __call__(self, query: Query) -> float:
            raise KeyError("num_tokens")

    with RewardRouter(terms={"broken": Broken()}, workers=1) as router, pytest.raises(KeyError):
        router.submit(response="\\boxed{x}", ground_truth="y", problem_type="math").result(timeout=60)
