"""Golden prompts: every benchmark in every style, word for word.

`python -m tests.test_eval_benchmarks_prompts` writes the files anew after a change that is meant.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from datamodules.prompts import place_media
from eval.benchmarks import catalogue, prompts
from eval.benchmarks.drafts import Draft, gold_letter, inline_options, letter_list, option_texts
from eval.benchmarks.loading import load
from tests import eval_official_files, eval_official_reasoning

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(eval_official_files.WRITERS)


def rendered(root: Path, name: str) -> str:
    """Prompts of a benchmark's small files: one block per style and kind of question."""
    eval_official_files.write(root, name)
    blocks = []
    for style in prompts.STYLES:
        kinds = {}
        for item in load(catalogue.get(name), root, style=style)[0]:
            kinds.setdefault((item.sample.problem_type, item.sample.data_type), item)
        for item in kinds.values():
            head = [f"=== {style} | {item.uid} | {item.sample.problem_type} | gold {item.sample.answer}"]
            head += [f"--- system: {item.system}"] if item.system else []
            tail = [f"--- answer begins: {item.answer_prefix}"] if item.answer_prefix else []
            blocks.append("\n".join([*head, item.sample.problem, *tail]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_the_snapshot(tmp_path: Path, name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    assert rendered(tmp_path, name) == path.read_text(encoding="utf-8"), f"{path.name} differs; see this file's head"


def test_every_benchmark_has_a_snapshot() -> None:
    """Variants with subtitles are tested with their subtitles elsewhere."""
    assert set(catalogue.names(variants=False)) <= set(NAMES)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(NAMES)


@pytest.mark.parametrize("style", prompts.STYLES)
def test_instructions_name_the_letters_that_exist(tmp_path: Path, style: str) -> None:
    eval_official_files.write(tmp_path, "mvbench")
    eval_official_files.write(tmp_path, "videomme_v2")
    eight = load(catalogue.get("videomme_v2"), tmp_path, style=style)[0][0].sample.problem
    three = load(catalogue.get("mvbench"), tmp_path, style=style)[0][0].sample.problem
    assert "H. thing 7" in eight
    assert ("H" in eight.split("\n")[-1]) or "A, B, C, D, E, F, G, or H" in eight
    if style != "official":
        assert "A, B, or C" in three
        assert "D" not in three


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", prompts.STYLES)
def test_every_medium_has_its_place(tmp_path: Path, name: str, style: str) -> None:
    eval_official_files.write(tmp_path, name)
    for item in load(catalogue.get(name), tmp_path, style=style)[0]:
        sample = item.sample
        parts = place_media(sample.problem, len(sample.images), len(sample.videos))
        assert [part["type"] for part in parts].count("video") == len(sample.videos) == sample.problem.count("<video>")
        assert [part["type"] for part in parts].count("image") == len(sample.images) == sample.problem.count("<image>")


def test_images_stand_behind_the_video(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "videommmu")
    items = load(catalogue.get("videommmu"), tmp_path)[0]
    adaptation = [item for item in items if item.meta["track"] == "Adaptation"]
    assert len(adaptation) == 2
    for item in adaptation:
        assert item.sample.problem.startswith("<video>\n<image>\nYou should watch and learn the video content.")
        assert "<image 1>" not in item.sample.problem
        assert Path(item.sample.images[0].path).read_bytes() == eval_official_reasoning.PNG
    alone = load(catalogue.get("videommmu_question_only"), tmp_path)[0]
    assert [item.uid.partition(":")[2] for item in alone] == [item.uid.partition(":")[2] for item in adaptation]
    assert all(item.sample.data_type == "image" and not item.sample.videos for item in alone)


def test_media_tags_in_a_question_ask_for_nothing() -> None:
    draft = Draft("x:1", "What does <video> mean, and <image>?", "A", "multiple choice", ("a <video> tag", "b"))
    text = prompts.render(prompts.shared_template("cot"), draft, media="")
    assert "<video>" not in text
    assert "What does [video] mean, and [image]?" in text


def test_unknown_style_and_broken_template() -> None:
    with pytest.raises(ValueError, match=r"'poem'.*cot, official, qwen3vl"):
        prompts.shared_template("poem")
    with pytest.raises(ValueError, match=r"x:1.*nonsense"):
        prompts.render("{{ nonsense }}", Draft("x:1", "q", "A", "multiple choice"))


def test_letter_lists() -> None:
    assert [letter_list("ABCDE"[:n]) for n in range(1, 6)] == [
        "A",
        "A or B",
        "A, B, or C",
        "A, B, C, or D",
        "A, B, C, D, or E",
    ]


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (["A. one", "B. two"], ("one", "two")),
        (["A: one", "B: two"], ("one", "two")),
        (["(A) one", "(B) two"], ("one", "two")),
        (["3", "4"], ("3", "4")),
        (["A. one", "C. two"], ("A. one", "C. two")),
        ({"B": "two", "A": "one", "C": None}, ("one", "two")),
        ("A. one\nB. two", ("one", "two")),
        ("['one', 'two']", ("one", "two")),
        ('{"A": "one", "B": "two"}', ("one", "two")),
        (None, ()),
        ("nan", ()),
    ],
)
def test_options_in_every_published_form(value: object, texts: tuple[str, ...]) -> None:
    assert option_texts(value) == texts


@pytest.mark.parametrize(
    ("text", "question", "texts"),
    [
        ("What?\n(A) one\n(B) two", "What?", ("one", "two")),
        ("What? (A) one (B) two", "What?", ("one", "two")),
        ("What?\nA. one\nB. two\nand more", "What?", ("one", "two\nand more")),
        ("A. Smith or B. Jones?", "A. Smith or B. Jones?", ()),
        ("Is (A) right?", "Is (A) right?", ()),
    ],
)
def test_options_inside_of_the_question(text: str, question: str, texts: tuple[str, ...]) -> None:
    assert inline_options(text) == (question, texts)


@pytest.mark.parametrize(
    ("answer", "form", "letter"),
    [
        ("B", "auto", "B"),
        ("(b)", "letter", "B"),
        ("B. two", "letter", "B"),
        ("Two.", "text", "B"),
        (1, "index", "B"),
        ("<answer>A</answer>", "auto", "A"),
        ("A", "text", None),
        ("C", "auto", None),
        (2, "index", None),
        (None, "auto", None),
    ],
)
def test_gold_answers_in_every_published_form(answer: object, form: str, letter: str | None) -> None:
    if letter is None:
        with pytest.raises(ValueError, match="gold"):
            gold_letter(answer, ("one", "two"), form)
    else:
        assert gold_letter(answer, ("one", "two"), form) == letter


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in NAMES:
            (GOLDEN / f"{benchmark}.txt").write_text(rendered(Path(folder), benchmark), encoding="utf-8")
