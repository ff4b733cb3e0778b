"""Scores per benchmark: rules, the judge behind a real endpoint, and the simulators of VideoReasonBench."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from eval.benchmarks import catalogue
from eval.benchmarks.base import submit
from eval.benchmarks.comparison import summarise
from eval.benchmarks.loading import load
from eval.benchmarks.simulator import NoTargetError, reaches_target
from eval.benchmarks.types import BenchmarkItem, ScoredItem
from rewards.base import Score
from rewards.judge.client import Judge, OpenAIBackend
from rewards.router import RewardRouter
from tests import eval_official_files, eval_official_reasoning
from tests.eval_helpers import item
from tests.test_rewards_judge import ScriptedServer, server  # noqa: F401 - a fixture

RIGHT = '{"reason": "same", "score": 1}'


@pytest.fixture(scope="module")
def router() -> Iterator[RewardRouter]:
    with RewardRouter() as plain:
        yield plain


@pytest.fixture
def judging(server: ScriptedServer) -> Iterator[RewardRouter]:  # noqa: F811
    backend = OpenAIBackend(model="judge", base_url=server.url, timeout_s=60.0)
    with RewardRouter(judge=Judge(backend, attempts=1)) as with_judge:
        yield with_judge


def ask(name: str, entry: BenchmarkItem, response: str, router: RewardRouter) -> tuple[str, Score, Score]:
    """(state, official, robust)."""
    benchmark = catalogue.get(name)
    futures = benchmark.score(entry, response, router)
    wait(futures, timeout=300)
    official, robust = (future.result() for future in futures)
    return benchmark.state(entry, official, robust), official, robust


def official_items(root: Path, name: str, style: str = "official") -> dict[str, BenchmarkItem]:
    items = load(catalogue.get(name), eval_official_files.write(root, name), style=style)[0]
    return {entry.uid.partition(":")[2]: entry for entry in items}


@pytest.mark.parametrize(
    ("name", "uid", "response", "official", "robust"),
    [
        ("videomme", "001-2", "B", 1.0, 1.0),
        ("videomme", "001-1", "Clearly the answer is A.", 0.0, 1.0),
        ("mvbench", "action_count-0", "(B) 4", 1.0, 1.0),
        ("mlvu", "ego-0", "C) Blue", 1.0, 1.0),
        ("mlvu_test", "0", "F) salt", 1.0, 1.0),
        ("tempcompass", "multi-choice-1021488277-0", "B. walking", 1.0, 1.0),
        ("tempcompass", "yes_no-1021488277-0", "Yes, he is.", 1.0, 1.0),
        ("tempcompass", "caption_matching-1021488277-0", "Option 1", 1.0, 1.0),
        ("vsibench", "0", "3", 0.6, 0.6),
        ("vsibench", "1", "A.", 1.0, 1.0),
        ("ovobench", "1_1", "2", 1.0, 1.0),
        ("ovobench", "2_0", "Yes", 1.0, 1.0),
        ("ovobench", "3_0", "Not yet", 1.0, 1.0),
        ("videommmu", "Adaptation-dev_Math_1", "The answer is 12.97", 1.0, 1.0),
        ("holmes", "17", "<think>...</think><answer>F</answer>", 1.0, 1.0),
        ("longvideoreason", "0", "<think>x</think><answer>B</answer>", 1.0, 1.0),
        ("livesports3k_qa", "I0rO_e10_q1", " A: at once", 1.0, 1.0),
        ("videomme", "001-1", "<think>Clearly blue, B? No, Cyan.</think>\n\nA", 1.0, 1.0),
        ("vsibench", "0", "<think>Five?</think> 4", 1.0, 1.0),
        ("vcrbench", "2", "It falls from 11 s to 20 s: [11, 20]", 1.0, 1.0),
        ("vcrbench", "2", "[16, 20]", 0.0, 0.0),
    ],
)
def test_rules(
    tmp_path: Path, router: RewardRouter, name: str, uid: str, response: str, official: float, robust: float
) -> None:
    state, by_rule, careful = ask(name, official_items(tmp_path, name)[uid], response, router)
    assert (by_rule.accuracy, careful.accuracy) == (pytest.approx(official), pytest.approx(robust))
    assert state == "ok"


REPEATED = ("9", "9.", "9 - ", " ", "A. ", "(A", "to ", "<answer>", "[1,", "1:00 ")


@pytest.mark.parametrize("name", catalogue.names(variants=False))
def test_a_response_that_repeats_itself_without_end_is_soon_scored(
    tmp_path: Path, router: RewardRouter, name: str
) -> None:
    entries = {entry.sample.problem_type: entry for entry in official_items(tmp_path, name).values()}
    for unit in REPEATED:
        response = f"Final Answer: {unit * (20_000 // len(unit))}x"
        for entry in entries.values():
            started = time.process_time()
            submit(catalogue.get(name), entry, response, router, "official").result()
            assert time.process_time() - started < 60.0, f"{entry.uid} {unit!r}"


@pytest.mark.parametrize(
    ("style", "response", "iou"),
    [
        ("official", "The event happens in 1.5 - 6.0 seconds", 1.0),
        ("qwen3vl", '{"time": [1.5, 3.75]}', 0.5),
        ("cot", 'It starts when ... \n{"time": [1.5, 6.0]}', 1.0),
    ],
)
def test_charades_reads_sentences_and_json(
    tmp_path: Path, router: RewardRouter, style: str, response: str, iou: float
) -> None:
    entry = official_items(tmp_path, "charades_sta", style)["0"]
    _, official, robust = ask("charades_sta", entry, response, router)
    assert (official.accuracy, robust.accuracy) == (pytest.approx(iou), pytest.approx(iou))
    state, *_ = ask("charades_sta", entry, "no idea", router)
    assert state == "unparsed"


TUBE = '{"time": [1.0, 2.0], "boxes": {"1": [64, 36, 128, 72], "2": [64, 36, 128, 72]}}'
PIXELS = {"gold_coordinates": "pixel", "answer_coordinates": "relative1000", "width": 640, "height": 360}


@pytest.mark.parametrize(
    ("response", "tiou", "viou"),
    [
        ('{"time": [1.0, 2.0], "boxes": {"1": [100, 100, 200, 200], "2": [100, 100, 200, 200]}}', 100, 100),
        ('{"time": [1.0, 2.0], "boxes": {"1": [100, 100, 200, 200]}}', 100, 50),
        ('{"time": [1.0, 3.0], "boxes": {"1": [100, 100, 200, 200], "3": [100, 100, 200, 200]}}', 50, 100 / 3),
        ("nothing", 0, 0),
    ],
)
def test_boxes_are_compared_in_pixels_over_the_union_of_seconds(
    router: RewardRouter, response: str, tiou: float, viou: float
) -> None:
    entry = item("stvg:0", TUBE, options=(), problem_type="spatial-temporal grounding", extra=PIXELS)
    state, official, robust = ask("stvg", entry, response, router)
    summary = summarise(catalogue.get("stvg"), [ScoredItem(entry, state, official, robust, response)])
    for headline in (summary.headline, summary.robust_headline):
        assert headline["m_tIoU"] == pytest.approx(tiou)
        assert headline["m_vIoU"] == pytest.approx(viou)
        assert headline["vIoU@0.5"] == (100.0 if viou >= 50 else 0.0)


def test_without_a_judge_open_answers_are_not_judged(tmp_path: Path, router: RewardRouter) -> None:
    mmvu = official_items(tmp_path, "mmvu")
    assert ask("mmvu", mmvu["validation_1"], "Dolly zoom", router)[0] == "not_judged"
    state, official, robust = ask("mmvu", mmvu["validation_0"], "A", router)
    assert (state, official.status, robust.accuracy) == ("not_judged", "not_judged", 1.0)
    vcr = official_items(tmp_path, "vcrbench")
    assert ask("vcrbench", vcr["0"], "The kitchen", router)[0] == "not_judged"
    caption = official_items(tmp_path, "tempcompass")["captioning-1021488277-0"]
    assert ask("tempcompass", caption, "A man walks.", router)[0] == "not_judged"


def test_the_judge_sees_question_options_and_the_gold_option(
    tmp_path: Path,
    server: ScriptedServer,  # noqa: F811
    judging: RewardRouter,
) -> None:
    server.replies = [(200, RIGHT)]
    mmvu = official_items(tmp_path, "mmvu")
    state, official, robust = ask("mmvu", mmvu["validation_0"], "<think>no</think>10 grams", judging)
    assert (state, official.accuracy, robust.accuracy) == ("ok", 1.0, 1.0)
    sent = server.requests[0]["messages"][1]["content"]
    assert "How many grams precipitate?" in sent
    assert "E. 20.0" in sent
    assert '"reference_answer": "A. 10.0"' in sent
    assert '"answer_to_grade": "10 grams"' in sent
    caption = official_items(tmp_path, "tempcompass")["captioning-1021488277-0"]
    assert ask("tempcompass", caption, "A man walks.", judging)[1].accuracy == 1.0
    sent = server.requests[-1]["messages"][1]["content"]
    assert "from the description alone" in sent
    assert "What is the man doing?" in sent  # the choice question about the same video and dimension
    assert "B. walking" in sent


def test_partly_right_is_wrong_and_a_failing_judge_is_not_judged(
    tmp_path: Path,
    server: ScriptedServer,  # noqa: F811
    judging: RewardRouter,
) -> None:
    entry = official_items(tmp_path, "vcrbench")["0"]
    server.replies = [(200, '{"reason": "half", "score": 0.4}'), (200, "rubbish"), (429, "slow down")]
    states = [ask("vcrbench", entry, answer, judging) for answer in ("a bath", "a hall", "a loft")]
    assert [(state, official.accuracy) for state, official, _ in states] == [
        ("ok", 0.0),
        ("not_judged", 0.0),
        ("not_judged", 0.0),
    ]
    assert "the judge failed" in states[1][1].reason


def test_what_temporal_rules_leave_open_goes_to_the_judge_or_counts_as_wrong(
    tmp_path: Path,
    server: ScriptedServer,  # noqa: F811
    judging: RewardRouter,
    router: RewardRouter,
) -> None:
    entry = official_items(tmp_path, "tempcompass")["multi-choice-1021488277-0"]
    state, official, robust = ask("tempcompass", entry, "He is walking, so (B).", router)
    assert (state, official.status, official.accuracy, robust.accuracy) == ("ok", "unparsable", 0.0, 1.0)
    server.replies = [(200, RIGHT)]
    assert ask("tempcompass", entry, "He is walking, so (B).", judging)[1].accuracy == 1.0


def test_the_marker_and_the_simulator_of_reasoning_over_states(tmp_path: Path, router: RewardRouter) -> None:
    items = official_items(tmp_path, "videoreasonbench")
    operation, counted = items["card-state1_operation"], items["card-state1_count"]
    assert (operation.needs_judge, counted.needs_judge) == (False, True)
    right = "Final Answer: remove 9 of Spades from pile0, add 7 of Diamonds to pile0"
    wrong = "Final Answer: add 7 of Diamonds to pile0"
    for response, expected in (
        (right, ("ok", 1.0)),
        (wrong, ("ok", 0.0)),
        ("Final Answer: none", ("unparsed", 0.0)),
        ("remove 9 of Spades from pile0, add 7 of Diamonds to pile0", ("unparsed", 0.0)),
    ):
        state, official, _ = ask("videoreasonbench", operation, response, router)
        assert (state, official.accuracy) == expected
    assert ask("videoreasonbench", counted, "Final Answer: 1 card", router)[0] == "not_judged"
    assert ask("videoreasonbench", counted, "1 card", router)[0] == "unparsed"


def test_every_published_operation_question_names_its_target(shared_data: Path) -> None:
    items = load(catalogue.get("videoreasonbench"), shared_data / "eval" / "annotations")[0]
    held = {"pile0": [[]], "pile1": [[]], "cup0": [[]], "cup1": [[]], **{f"path{i}": [[]] for i in range(4)}}
    board = {"states": [[[0] * 5 for _ in range(5)]], "coords": [[0, 0]]}
    answers = {
        "card": "add 2 of Clubs to pile0",
        "chip": "add 5 to cup0, " * 40,
        "file_sys": "touch path0/{never.txt}",
        "cup": "(a1, a2)",
        "grid": "right",
        "hrd": "right",
    }
    asked = [one for one in items if one.meta["dim"] == "prediction_operation"]
    assert len(asked) == 240
    for one in asked:
        world = one.meta["world"]
        record = {"states": held} if world in ("card", "chip", "file_sys") else board
        assert reaches_target(world, one.sample.extra["question"], record, answers[world]) is False, one.uid


def test_operations_without_states_are_not_judged(shared_data: Path, router: RewardRouter) -> None:
    items = load(catalogue.get("videoreasonbench"), shared_data / "eval" / "annotations", limit=10)[0]
    entry = next(one for one in items if one.meta["dim"] == "prediction_operation")
    assert ask("videoreasonbench", entry, "Final Answer: add 2 of Clubs to pile0", router)[0] == "not_judged"


def chips(target: str) -> str:
    return f"To ensure that `cup0` contains exactly the following chips: `{target}` (order does not matter), what?"


GRID = "the desired arrangement of black and white pieces: `(a,0): black, (a,1): black, (b,0): black, (b,1): white`?"
CUPS = "a 2x2 board ... the desired distribution of coins: `a1, b2`?"
HRD = "on a 2x2 board ... the desired number arrangement: `(a,1): 0, (a,2): 2, (b,1): 1, (b,2): 3`?"
FILES = "to ensure that `path0` contains exactly the following files: `a.txt, c.py`, what sequence?"
FILE_STATES = {"states": {"path0": {"init": ["x.py"], "touch path0/{a.txt,b.txt}": ["a.txt", "b.txt"]}}}
CASES = [
    (
        "chip",
        chips("10, 5, 5"),
        {"states": {"cup0": [[20], [5, 20]]}},
        "remove 20 cup0, add 5 to cup0, add 10 cup0",
        True,
    ),
    ("chip", chips("5, 20"), {"states": {"cup0": [[20], [20, 5]]}}, "add 5 to cup0, remove 5 cup0", True),
    ("chip", chips("5"), {"states": {"cup0": [[5]]}}, "add 7 to cup0, remove 7 from cup0", False),
    ("chip", chips("5"), {"states": {"cup0": [[5, 10]]}}, "remove 20 from cup0", False),
    ("chip", chips("5"), {"states": {"cup0": [[5, 10]]}}, "take one out", None),
    ("file_sys", FILES, FILE_STATES, "`touch path0/{c.py} & rm -rf path0/{b.txt}`", True),
    ("file_sys", FILES, FILE_STATES, "rm -rf path0/b.txt & touch path0/c.py", True),
    ("file_sys", FILES, FILE_STATES, "touch path0/{c.py} & rm -rf path0/{b.txt} & touch path0/{a.txt}", False),
    ("file_sys", FILES, FILE_STATES, "touch path0/{c.py,b.txt} & rm -rf path0/{b.txt}", False),
    ("cup", CUPS, {"states": [[[1, 1], [0, 0]]]}, "(a2, b2)", True),
    ("cup", CUPS, {"states": [[[1, 1], [0, 0]]]}, "(a1, b1), (b1, b2), (a2, a1)", True),
    ("cup", CUPS, {"states": [[[1, 1], [0, 0]]]}, "(a1, b1)", False),
    ("cup", CUPS, {"states": [[[1, 1], [0, 0]]]}, "(a1, c3)", False),
    ("grid", GRID, {"states": [[[0, 0], [1, 0]]], "coords": [[0, 0]]}, "right, left, right", False),
    ("grid", GRID, {"states": [[[0, 0], [1, 1]]], "coords": [[0, 0]]}, "right", True),
    ("grid", GRID, {"states": [[[0, 0], [1, 1]]], "coords": [[0, 0]]}, "up, right", True),
    ("hrd", HRD, {"states": [[[1, 3], [2, 0]]]}, "right", True),
    ("hrd", HRD, {"states": [[[1, 3], [2, 0]]]}, "left, up, right", False),
]


@pytest.mark.parametrize(("world", "question", "record", "answer", "expected"), CASES)
def test_simulated_worlds(world: str, question: str, record: dict, answer: str, expected: bool | None) -> None:
    assert reaches_target(world, question, record, answer) is expected


@pytest.mark.parametrize("unit", ["a ", "a  1, b", "remove 5 from ", "Hearts", "{", " "])
def test_simulators_soon_read_a_response_that_repeats_itself(unit: str) -> None:
    for world, question, record, _, _ in {case[0]: case for case in CASES}.values():
        started = time.process_time()
        for answer in (unit * (20_000 // len(unit)), "remove 5" + " " * 20_000, "(a" + " " * 20_000):
            reaches_target(world, question, record, answer)
        assert time.process_time() - started < 60.0


def test_published_moves_lead_from_state_to_state() -> None:
    """The first record of the published sliding puzzle: down, right, up, up, left."""
    first = [[6, 5, 8], [4, 3, 0], [2, 1, 7]]
    last = [[6, 8, 0], [4, 5, 7], [2, 3, 1]]
    cells = ", ".join(f"({'cba'[r]},{c + 1}): {last[r][c]}" for r in range(3) for c in range(3))
    question = f"on a 3x3 board ... the desired number arrangement: `{cells}`?"
    record = {"states": [first]}
    assert reaches_target("hrd", question, record, "down, right, up, up, left") is True
    assert reaches_target("hrd", question, record, "down, right, up, up") is False
    grid_first, grid_last = [[0, 1, 0], [0, 0, 1], [0, 0, 0]], [[1, 1, 1], [1, 0, 1], [0, 0, 1]]
    colours = ("white", "black")
    cells = ", ".join(f"({'abc'[r]},{c}): {colours[grid_last[r][c]]}" for r in range(3) for c in range(3))
    question = f"the desired arrangement of black and white pieces: `{cells}`?"
    record = {"states": [grid_first], "coords": [[2, 0]]}
    assert reaches_target("grid", question, record, "left, down, down, right, left") is True


def test_broken_records_are_not_blamed_on_the_answer() -> None:
    with pytest.raises(NoTargetError, match="states"):
        reaches_target("card", eval_official_reasoning.CARD_QUESTION, {}, "add 2 of Clubs to pile0")
    with pytest.raises(NoTargetError, match="following chips"):
        reaches_target("chip", "what?", {"states": {"cup0": [[5]]}}, "add 5 to cup0")
    with pytest.raises(ValueError, match="world 'chess'"):
        reaches_target("chess", "", {}, "")


def test_a_record_without_gold_is_failed_not_an_exception(router: RewardRouter) -> None:
    entry = item("videomme:9", "Z", options=("A. one", "B. two"))
    state, official, robust = ask("videomme", entry, "A", router)
    assert state == "failed"
    assert "Z" in official.reason + robust.reason


def test_published_cards_and_chips_are_reached_by_the_only_way() -> None:
    """First records of the published card and chip worlds: their last states and targets, solved by hand."""
    pile = ["8 of Clubs", "3 of Diamonds", "8 of Diamonds", "King of Diamonds", "Queen of Clubs", "Ace of Hearts"]
    pile += ["Jack of Diamonds", "Jack of Clubs"]  # from bottom to top
    question = (
        "to ensure that `pile0` contains exactly the following cards from top to bottom: "
        "`7 of Diamonds, Jack of Clubs, Jack of Diamonds, Ace of Hearts`, what sequence of actions?"
    )
    removals = ", ".join(f"remove {card} from pile0" for card in pile[:5])
    record = {"states": {"pile0": [[], pile]}}
    assert reaches_target("card", question, record, f"{removals}, add 7 of Diamonds to pile0") is True
    assert reaches_target("card", question, record, f"add 7 of Diamonds to pile0, {removals}") is True
    assert reaches_target("card", question, record, f"{removals}, add 7 of Hearts to pile0") is False
    assert reaches_target("card", question, record, "remove Jack of Clubs from pile0") is False  # not at the bottom
    question = (
        "to ensure that `cup0` contains exactly the following chips: `100, 10, 5, 5, 10, 20` (order does not matter)"
    )
    record = {"states": {"cup0": [[20, 10, 100], [20, 100, 10, 5]]}}
    assert reaches_target("chip", question, record, "add 5 to cup0, add 10 to cup0") is True
    assert reaches_target("chip", question, record, "add 5 to cup0, add 5 to cup0") is False
