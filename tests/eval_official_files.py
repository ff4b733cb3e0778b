"""Small annotation files of every benchmark in the form in which it is published; questions are made up.

`write(root, name)` writes what a download leaves behind below `root/<name>` (annotations only).
"""

from __future__ import annotations

from pathlib import Path

from tests import eval_official_reasoning
from tests.eval_helpers import write_json, write_jsonl, write_parquet

FOUR = ["A. a red cup", "B. a blue bowl", "C. a green box", "D. a yellow jar"]


def write(root: Path, name: str) -> Path:
    """Write the official files of one benchmark; returns the data root."""
    WRITERS[name](root / name)
    return root


def videomme(folder: Path) -> None:
    rows = [
        {
            "video_id": "001",
            "duration": "short",
            "domain": "Knowledge",
            "sub_category": "Humanity & History",
            "url": "https://example.org/v",
            "videoID": "vid_a",
            "question_id": f"001-{i + 1}",
            "task_type": "Object Recognition",
            "question": "What does the person pick up?",
            "options": FOUR,
            "answer": "ABC"[i],
        }
        for i in range(3)
    ]
    write_parquet(folder / "videomme" / "test-00000-of-00001.parquet", rows)


def videomme_v2(folder: Path) -> None:
    options = "\n".join(f"{letter}. thing {i}" for i, letter in enumerate("ABCDEFGH"))
    rows = [
        {
            "video_id": "001",
            "question_id": f"001-{i + 1}",
            "question": "Which thing comes next?",
            "options": options,
            "answer": "ABCH"[i],
            "group_type": "logic",
            "group_structure": "[1, 2, 3, 4]",
            "level": "2" if i == 3 else None,
            "second_head": "Order" if i == 3 else None,
            "third_head": "Next" if i == 3 else None,
        }
        for i in range(4)
    ]
    write_parquet(folder / "test.parquet", rows)


def mvbench(folder: Path) -> None:
    from eval.benchmarks import catalogue

    for number, task in enumerate(catalogue.get("mvbench").macro_groups):
        row = {
            "video": f"{task}.mp4",
            "question": "How many times does the light flash?",
            "candidates": ["3", "4", "5"],
            "answer": "4",
        }
        clip = {"start": 2.5, "end": 9.0} if number == 0 else {}
        write_json(folder / "json" / f"{task}.json", [{**row, **clip}])


def tempcompass(folder: Path) -> None:
    questions = {
        "multi-choice": ({"question": "What is the man doing?\nA. running\nB. walking", "answer": "B. walking"},),
        "yes_no": ({"question": "Is the man walking?", "answer": "yes"},),
        "caption_matching": (
            {
                "question": "Which description fits?\nOption 1: He walks.\nOption 2: He runs.",
                "answer": "Option 1: He walks.",
            },
        ),
        "captioning": (
            {
                "question": "Pick the fitting information and write a caption.\nInformation A: {'action': 'walking'}\n"
                "Information B: {'action': 'running'}\nGenerated Caption:",
                "answer": "A. walking",
            },
        ),
    }
    for kind, rows in questions.items():
        write_json(folder / "questions" / f"{kind}.json", {"1021488277": {"action": list(rows)}})
    info = {"1021488277": {"eval_dim": {"action": {"type": "coarse-grained action"}, "speed": None}}}
    write_json(folder / "meta_info.json", info)


def motionbench(folder: Path) -> None:
    labelled = {"uid": "m1", "question": "How does it move?\nA. left\nB. right\nC. up", "answer": "C"}
    hidden = {"uid": "m2", "question": "How does it turn?\nA. left\nB. right", "answer": "NA"}
    record = {
        "key": "k",
        "video_path": "k.mp4",
        "video_type": "movie",
        "question_type": "Motion Recognition",
        "qa": [labelled, hidden],
    }
    write_jsonl(folder / "MotionBench" / "video_info.meta.jsonl", [record])


def lvbench(folder: Path) -> None:
    question = "What year is shown?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633"
    qa = [
        {
            "uid": "1",
            "question": question,
            "answer": "D",
            "question_type": ["reasoning", "entity recognition"],
            "time_reference": "00:15-00:19",
        },
    ]
    write_jsonl(folder / "video_info.meta.jsonl", [{"key": "Cm73", "type": "documentary", "qa": qa}])


def longvideobench(folder: Path) -> None:
    record = {
        "id": "86Cx_0",
        "video_id": "86Cx",
        "video_path": "86Cx.mp4",
        "question": "What is said while the door opens?",
        "candidates": ["hello", "goodbye", "nothing"],
        "correct_choice": 1,
        "duration": 12.5,
        "duration_group": 15,
        "question_category": "T2E",
        "topic_category": "vlog",
        "subtitle_path": "86Cx_en.json",
        "starting_timestamp_for_subtitles": 0,
    }
    write_json(folder / "lvb_val.json", [record])


def mlvu(folder: Path) -> None:
    tasks = ("plotQA", "needle", "ego", "count", "order", "anomaly_reco", "topic_reasoning")
    for number, task in enumerate(tasks, start=1):
        row = {
            "video": f"{task}_1.mp4",
            "duration": 480.0,
            "question": "What colour is the lamp?",
            "candidates": ["Red", "Green", "Blue", "White"],
            "answer": "Blue",
            "question_type": task,
            "question_id": "Q0",
        }
        write_json(folder / "json" / f"{number}_{task}.json", [row])


def mlvu_test(folder: Path) -> None:
    row = {
        "video": "test_ego_27.mp4",
        "question": "What is on the table?",
        "candidates": ["cup", "fork", "knife", "plate", "spoon", "salt"],
        "answer": "salt",
        "question_type": "sportsQA",
    }
    write_json(folder / "test_multi_choice_tasks.json", [row])


def holmes(folder: Path) -> None:
    record = {
        "video ID": "fH6b",
        "Question ID": 17,
        "Question Type": "SR",
        "Question": "Who is the man?",
        "Options": {"A": "neighbor", "B": "colleague", "C": "brother", "D": "doctor", "E": "stranger", "F": "friend"},
        "Answer": "F",
        "Explanation": "They greet each other.",
    }
    write_json(folder / "test_Video-Holmes.json", [record])


def minerva(folder: Path) -> None:
    record = {
        "key": "--C2:5",
        "video_id": "--C2",
        "question": "What happens first?",
        **{f"answer_choice_{i}": f"event {i}" for i in range(5)},
        "answer": "event 2",
        "answer_id": 2,
        "question type": "Temporal Reasoning",
        "split": "short",
        "category": "Sports",
        "reasoning": "At 0:05 ...",
    }
    write_json(folder / "minerva.json", [record])


def vcrbench(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        ("id", "video_path", "question", "choices", "answer", "dimension", "duration", "multiple-choice"),
        ("0", "video/a.mp4", "Which room?", "{'A': '', 'B': ''}", "Kitchen", "FTR", "30", "0"),
        ("1", "video/a.mp4", '"Which tool?A. saw\nB. axe\n"', "{'A': 'saw', 'B': 'axe'}", "B", "VPA", "200", "1"),
        ("2", "video/a.mp4", "When does it fall?", "", "[10, 20]", "TSG", "400", "0"),
    ]
    (folder / "VCR-Bench.tsv").write_text("\n".join("\t".join(row) for row in rows) + "\n", encoding="utf-8")


def vsibench(folder: Path) -> None:
    base = {"dataset": "arkitscenes", "scene_name": "41069025"}
    rows = [
        {
            **base,
            "id": 0,
            "question_type": "object_counting",
            "question": "How many tables are there?",
            "options": None,
            "ground_truth": "4",
        },
        {
            **base,
            "id": 1,
            "question_type": "route_planning",
            "question": "Where to turn?",
            "options": ["A. left", "B. right"],
            "ground_truth": "A",
        },
    ]
    write_jsonl(folder / "test.jsonl", rows)


def charades_sta(folder: Path) -> None:
    rows = [{"video": "0F7LW.mp4", "caption": "person turn a light on.", "timestamp": [1.5, 6.0]}]
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", rows)


def stvg(folder: Path) -> None:
    record = {
        "video_path": "8670554760.mp4",
        "conversations": [
            {"from": "human", "value": "<video>\nWho is watching the ball?"},
            {"from": "gpt", "value": ""},
        ],
        "meta": {
            "split": [0, 90],
            "width": 640,
            "height": 360,
            "spatial_token": {"<bboxes>": {str(frame): [64, 36, 64, 36] for frame in range(30, 61)}},
            "time_token": {"<s>": 30, "<e>": 60},
        },
    }
    write_json(folder / "stvg.json", [record])


def ovobench(folder: Path) -> None:
    base = {"video": "src.mp4", "realtime": 12.0}
    rows = [
        {**base, "id": 0, "task": "EPM", "question": "Who spoke?", "options": ["he", "she"], "gt": 1},
        {
            **base,
            "id": 1,
            "task": "REC",
            "activity": "jump",
            "test_info": [{"realtime": 3.0, "count": 1}, {"realtime": 9.0, "count": 2}],
        },
        {**base, "id": 2, "task": "SSR", "test_info": [{"realtime": 4.0, "type": 1, "step": "cut the paper"}]},
        {
            **base,
            "id": 3,
            "task": "CRR",
            "question": "What does she do?",
            "answer": "sit",
            "test_info": [{"realtime": 5.0, "type": 0}],
        },
    ]
    write_json(folder / "data" / "ovo_bench_new.json", rows)


def odvbench(folder: Path) -> None:
    names = (
        "targeting_single_static_objects_v4",
        "targeting_multi_object_interaction_scenarios_or_events_v4",
        "targeting_single_dynamic_objects_v4",
    )
    for name in names:
        row = {
            "video": "d/1.mp4",
            "question": "Is the light red?",
            "candidates": ["yes", "no"],
            "answer": "no",
            "start": 0,
            "end": 7.5,
            "fps": 10,
            "task": "static",
            "subtask": "sign",
            "subsubtask": "light",
        }
        write_json(folder / "anno" / "eval" / "ODVBench" / f"{name}.json", [row])


def livesports3k_qa(folder: Path) -> None:
    record = {
        "video": "I0rO",
        "question_id": "I0rO_e10_q1",
        "q_type": "When",
        "OCR": 0,
        "question": "When does he shoot?",
        "options": ["A: at once", "B: later", "C: never", "D: twice"],
        "answer": "A",
        "begin": 300.745,
        "end": 350.676,
    }
    write_json(folder / "LiveSports-3K-QA.json", [record])


WRITERS = {
    name: value
    for name, value in {**vars(eval_official_reasoning), **globals()}.items()
    if callable(value) and value.__module__.startswith("tests.eval_official") and not name.startswith(("write", "_"))
}
