"""Reading answers out of text: one row per phrasing, exact expected values."""

from __future__ import annotations

import time
import warnings

import pytest

from rewards.extract import (
    find_boolean,
    find_box,
    find_choice,
    find_interval,
    find_number,
    find_structure,
    parse_options,
    read_answer,
)
from rewards.extract.choice import gold_label

FRUIT = parse_options(("A. a ripe apple", "B. two bananas", "C. a bowl of cherries", "D. dates"))
TEN = parse_options(tuple(f"{letter}. {k / 10}" for k, letter in enumerate("ABCDEFGHIJ", 1)))

CHOICES = [
    ("C", "C"),
    ("c.", "C"),
    ("(c)", "C"),
    ("[C]", "C"),
    ("'C'", "C"),
    ("`C`", "C"),
    ("**C**", "C"),
    ("<b>C</b>", "C"),
    ("Ｃ", "C"),
    ("（Ｃ）", "C"),
    ("Ⓒ", "C"),
    ("C) a bowl of cherries", "C"),
    ("C - a bowl", "C"),
    ("Answer C", "C"),
    ("Answer=C", "C"),
    ("**Answer: C. a bowl of cherries**", "C"),
    ("### Final Answer\nC", "C"),
    ("So the answer is **(C)**.", "C"),
    ("Therefore the answer is $\\mathbf{C}$", "C"),
    ("\\boxed{C}", "C"),
    ("\\boxed{\\text{C}}", "C"),
    ("\\boxed{C. a bowl of cherries}", "C"),
    ('{"answer": "C"}', "C"),
    ("选项C", "C"),
    ("我选择 C", "C"),
    ("答案为C。", "C"),
    ("应该选C。", "C"),
    ("C选项正确", "C"),
    ("Option A is incorrect, so C", "C"),
    ("The answer is not A, it is C", "C"),
    ("Not A. The answer must be C", "C"),
    ("C, not B", "C"),
    ("Definitely C rather than D", "C"),
    ("The answer is A. Correction: the answer is C.", "C"),
    ("A. No, wait: C", "C"),
    ("First A... no wait, it's C.", "C"),
    ("The answer could be A, but it is C.", "C"),
    ("Looking at the frames, C fits best.", "C"),
    ("C is my answer", "C"),
    ("C\n\nThe bowl is red.", "C"),
    ("A. a ripe apple\nB. two bananas\nC. a bowl of cherries\nD. dates\nAnswer: C", "C"),
    ("a bowl of cherries", "C"),
    ("Bowl of cherries.", "C"),
    ("it clearly shows two bananas", "B"),
    ("Not two bananas but dates", "D"),
    ("The answer is a ripe apple", "A"),
    ("A ripe apple", "A"),
    ("the answer is a", "A"),
    ("Hence, (A)", "A"),
    ("A man eats", None),
    ("the answer is a dog", None),
    ("The answer isn't A.", None),
    ("A and C", None),
    ("A/B", None),
    ("A或B", None),
    ("The answer is A or B.", None),
    ("A, B, C, D", None),
    ("ABCD", None),
    ("A\nB\nC\nD", None),
    ("A. a ripe apple\nB. two bananas\nC. a bowl of cherries\nD. dates", None),
    ("A is wrong. B is wrong.", None),
    ("A is wrong. B is wrong. C is wrong.", "D"),
    ("a ripe apple or dates", None),
    ("The answer is E", None),
    ("Therefore, the final answer is: $LETTER", None),
    ("None of the above", None),
    ("I don't know", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "label"), CHOICES)
def test_choice(text: str, label: str | None) -> None:
    assert find_choice(text, FRUIT)[0] == label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *[("I", "I"), ("I think the answer is C", "C"), ("I think it is I.", "I"), ("I choose I", "I")],
        *[("I. 0.9", "I"), ("Answer: J", "J"), ("0.4", "D"), ("The value is 0.40", "D"), ("I would say H", "H")],
        ("I am unsure", None),
    ],
)
def test_ten_options_with_the_pronoun(text: str, label: str | None) -> None:
    assert find_choice(text, TEN)[0] == label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *[("Option 2", "2"), ("2", "2"), ("Option 2 fits better", "2"), ("Option 2: pulling", "2")],
        *[
            ("The second option", "2"),
            ("they pull it", "2"),
            ("Option 1 or Option 2", None),
            ("3", None),
            ("Both", None),
        ],
    ],
)
def test_numbered_options(text: str, label: str | None) -> None:
    options = parse_options(("Option 1: They push it.", "Option 2: They pull it."))
    assert find_choice(text, options)[0] == label


def test_labels_come_from_the_options() -> None:
    assert parse_options(("(P) x", "(Q) y")).labels == ("P", "Q")
    assert parse_options(("Option 1: x", "Option 2: y")).labels == ("1", "2")
    assert parse_options(("Sentence A: x", "Sentence B: y")).labels == ("A", "B")
    assert parse_options(("red", "blue")).labels == ("A", "B")
    assert parse_options((), "M").labels[-1] == "M"
    assert gold_label("B. two bananas", FRUIT) == "B"
    assert gold_label("dates", FRUIT) == "D"
    with pytest.raises(ValueError, match="'E' is none of the labels A, B, C, D"):
        gold_label("E", FRUIT)


NUMBERS = [
    ("3.5", 3.5),
    ("about 3.5 meters", 3.5),
    ("$1,200.50", 1200.5),
    ("−4", -4),
    ("1/2", 0.5),
    ("1 1/2", 1.5),
    ("\\frac{3}{4}", 0.75),
    ("\\boxed{\\frac{3}{4}}", 0.75),
    ("2.5e3", 2500),
    ("3 \\times 10^{4}", 30000),
    ("5*10^3", 5000),
    ("fifty-two", 52),
    ("one hundred and five", 105),
    ("二十五个", 25),
    ("答案是3", 3),
    ("约为 3.5 米", 3.5),
    ("３", 3),
    ("**5**", 5),
    ("[5]", 5),
    ("50%", 50),
    ("3 + 2 = 5", 5),
    ("I count 3 red and 2 blue, so the total is 5", 5),
    ("First I thought 7, but the answer is 8", 8),
    ("7. Wait, actually 8.", 8),
    ("5 chairs and 2 tables", 5),
    ("The distance between chair 1 and table 2 is 3.4 meters.", 3.4),
    ("It happened 6 times in 20 seconds", 6),
    ("In 20 seconds it happened six times", 6),
    ("12 or 13", None),
    ("5-6", None),
    ("between 5 and 6", None),
    ("around 10 to 12", None),
    ("no one", None),
    ("nan", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_number(text: str, value: float | None) -> None:
    number = find_number(text)[0]
    assert (number.value if number else None) == (pytest.approx(value) if value is not None else None)


def test_a_range_counts_as_its_first_number_only_where_allowed() -> None:
    assert find_number("It is 5 to 6 m", allow_range=True)[0].value == 5
    assert find_number("It is 5 to 6 m")[0] is None


BOOLEANS = [
    ("Yes, the man falls.", True),
    ("No, there is not.", False),
    ("The answer is: **Yes**", True),
    ("The statement is false.", False),
    ("That is incorrect.", False),
    ("\\boxed{no}", False),
    ("Yes... actually, no.", False),
    ("No. Wait, yes.", True),
    ("The dog did not bark, so the answer is no", False),
    ("Not yet", False),
    ("不是", False),
    ("是的，他在跑", True),
    ("Y", True),
    ("I looked twice. N", False),
    ("Yes and no", None),
    ("yes/no", None),
    ("Not sure", None),
    ("Cannot answer", None),
    ("I know nothing", None),
    ("There is no dog.", None),
    ("Yesterday", None),
]


@pytest.mark.parametrize(("text", "value"), BOOLEANS)
def test_boolean(text: str, value: bool | None) -> None:
    assert find_boolean(text)[0] is value


INTERVALS = [
    ("[1.0, 3.0]", (1, 3)),
    ("{'time': [1, 3]}", (1, 3)),
    ('{"time": ["1s", "3s"]}', (1, 3)),
    ('{"start_time": "00:01", "end_time": "00:03"}', (1, 3)),
    ("from 1 to 3 seconds", (1, 3)),
    ("1.5s - 3.2s", (1.5, 3.2)),
    ("01:10-01:20", (70, 80)),
    ("1:02:03 - 1:02:10", (3723, 3730)),
    ("The event starts at 1 s and ends at 3 s.", (1, 3)),
    ("It begins at 00:05 and finishes at 00:09.", (5, 9)),
    ("从1秒到3秒", (1, 3)),
    ("1 → 3", (1, 3)),
    ("3 - 1", (1, 3)),
    ("-5 - 10", (-5, 10)),
    ("First 1-3. The answer is 5 - 9.", (5, 9)),
    ("The clip lasts 30 s; the event happens from 1 s to 3 s", (1, 3)),
    ("1-3 or 5-9", None),
    ("[NaN, 3]", None),
    ("[1, Infinity]", None),
    ('{"time": [10]}', None),
    ("10", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "interval"), INTERVALS)
def test_interval(text: str, interval: tuple[float, float] | None) -> None:
    assert find_interval(text)[0] == interval


@pytest.mark.parametrize(
    ("text", "box"),
    [
        *[("[1,2,3,4]", (1, 2, 3, 4)), ("[3,4,1,2]", (1, 2, 3, 4)), ("<box>(1,2),(3,4)</box>", (1, 2, 3, 4))],
        *[('[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]', (1, 2, 3, 4)), ("1 2 3 4", (1, 2, 3, 4))],
        *[("[1,2,3]", None), ("[1,2,3,nan]", None), ("nothing", None)],
    ],
)
def test_box(text: str, box: tuple[float, ...] | None) -> None:
    assert find_box(text)[0] == box


def test_structures() -> None:
    assert find_structure("```json\n{'a': [1, 2],}\n```") == {"a": [1, 2]}
    assert find_structure("{2: [1, 2]}") == {2: [1, 2]}
    assert find_structure('first {"a": 1}, then {"a": 2}') == {"a": 2}
    assert find_structure("[" * 10_000) is None
    assert find_structure("{__import__('os')}") is None


def test_odd_literals_are_silent(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    assert find_structure("[1and 2]") is None
    assert not recwarn.list


def test_sections() -> None:
    answer = read_answer("<think>A or C?</think> hm <answer>C</answer>")
    assert (answer.text, answer.tagged, answer.think, answer.head) == ("C", True, "closed", "hm")
    assert read_answer("reasoning without an opening tag</think>B").text == "B"
    assert read_answer("<think>never ends B").think == "open"
    assert read_answer("<think>a</think>B<think>again").text == ""
    assert read_answer("<think><answer>A</answer></think><answer>B</answer>").text == "B"
    assert read_answer("<answer>A</answer><answer>B</answer>").text == "B"
    assert read_answer("<answer>A</answer> tail").tail == "tail"
    assert read_answer("B<|im_end|>").text == "B"
    assert read_answer("<answer>B") == read_answer("<answer>B")
    assert read_answer("<answer>B").tagged is False


@pytest.mark.parametrize(
    "unit",
    [
        *[
            "answer is ",
            "\\boxed{",
            "final final ",
            "yes, ",
            "1-",
            "[1,",
            "<answer>",
            "A or ",
            "{",
            "not 1 ",
            "1m",
            "dates ",
        ],
        *["A (", "no, ", "1 000 ", "A. a ripe apple, B ", "one hundred and ", "start 1 end "],
    ],
)
def test_extraction_reads_endless_repetition(unit: str) -> None:
    """Steps that grow with the square of the length take minutes here; what grows with the length, a moment."""
    text = (unit * 100_000)[:100_000]
    started = time.process_time()
    answer = read_answer(text).text
    for find in (find_boolean, find_number, find_interval, find_box):
        find(answer)
    find_choice(answer, FRUIT)
    assert time.process_time() - started < 60.0
