"""Small official annotation files of the reasoning and science benchmarks; see `eval_official_files`."""

from __future__ import annotations

from pathlib import Path

from tests.eval_helpers import write_json, write_jsonl, write_parquet

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738"
    "550000000049454e44ae426082"
)
CARD_QUESTION = (
    "The video shows piles of cards.\n\nTo ensure that `pile0` contains exactly the following cards from top to "
    "bottom: `7 of Diamonds, 8 of Clubs`, what sequence of actions should be performed?\n\n"
    "Provide a summary of the final answer after 'Final Answer:'"
)


def videoreasonbench(folder: Path) -> None:
    operation = {
        "video": "videos/card/state1_op5_start.mp4",
        "question": CARD_QUESTION,
        "answer": None,
        "dim": "prediction_operation",
        "num_state": 1,
        "num_operation": 5,
        "visible_time": "start",
        "states": {"pile0": [["9 of Spades"], ["9 of Spades", "8 of Clubs"]]},
    }
    judged = {**operation, "question": "How many cards were added?", "answer": "1 card", "dim": "counting_operation"}
    write_json(folder / "questions" / "card.json", {"state1_count": judged, "state1_operation": operation})
    for world in ("chip", "cup", "file_sys", "grid", "hrd"):
        write_json(
            folder / "questions" / f"{world}.json", {"state3_count": {**judged, "video": f"videos/{world}/a.mp4"}}
        )


def longvideoreason(folder: Path) -> None:
    record = {
        "videos": "I_Q3.mp4",
        "problem": "Why does he leave?\nA. rain\nB. a call\nC. hunger\nD. fear",
        "answer": "B",
    }
    write_jsonl(folder / "test.jsonl", [record])


def mmvu(folder: Path) -> None:
    base = {
        "id": "validation_0",
        "video": "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Chemistry/0.mp4",
        "question_type": "multiple-choice",
        "question": "How many grams precipitate?",
        "choices": {"A": "10.0", "B": "5.0", "C": "12.0", "D": "15.0", "E": "20.0"},
        "answer": "A",
        "metadata": {"subject": "Chemistry", "rationale": "..."},
    }
    empty = dict.fromkeys("ABCDE", "")
    spoken = {**base, "id": "validation_1", "question_type": "open-ended", "choices": empty, "answer": "Dolly zoom"}
    write_json(folder / "validation.json", [base, {**spoken, "question": "Which shooting technique is shown?"}])


def videommmu(folder: Path) -> None:
    row = {
        "id": "dev_Biology_3",
        "question": "<image 1> What kind of sugar is this?",
        "options": ["aldose", "ketose", "glucose"],
        "answer": "B",
        "question_type": "multiple-choice",
    }
    plain = {**row, "question": "How many sugars are named?", "question_type": "perception"}
    image = {"bytes": PNG, "path": "dev_Biology_3.png"}
    number = {
        **row,
        "id": "dev_Math_1",
        "question": "How long is it? <image 1>",
        "options": [],
        "answer": "12.97",
        "question_type": "open",
        "image": image,
    }
    write_parquet(folder / "Perception" / "test-00000-of-00001.parquet", [plain])
    write_parquet(folder / "Comprehension" / "test-00000-of-00001.parquet", [plain])
    write_parquet(folder / "Adaptation" / "test-00000-of-00001.parquet", [{**row, "image": image}, number])


def _videomathqa(folder: Path, kind: str, rows: list[tuple[list[str], str]]) -> None:
    records = [
        {
            "question_id": "q-60",
            "videoID": "v1",
            "question": "What is the radius?",
            "options": options,
            "answer": answer,
            "category": "Geometry Length",
            "length": "medium",
            "steps": "{}",
        }
        for options, answer in rows
    ]
    write_parquet(folder / kind / "test-00000-of-00001.parquet", records)


def videomathqa(folder: Path) -> None:
    _videomathqa(folder, "mcq", [([f"{letter}. {i}/13" for i, letter in enumerate("ABCDE")], "C")])


def videomathqa_mbin(folder: Path) -> None:
    _videomathqa(folder, "multi_binary", [(["A. 3/13", "B. 1/9"], "B"), (["A. 2/13", "B. 1/9"], "B")])
