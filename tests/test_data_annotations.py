"""Records of every format become samples; what is wrong is reported with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter

import numpy as np
import pytest

from datamodules.annotations import clean_answer, load_samples, to_sample
from datamodules.orders import CurriculumOrder, LengthGroupedOrder
from datamodules.records import read_objects, read_records
from datamodules.types import MediaRef, Sample
from datamodules.video.quarantine import Quarantine
from rewards.router import RewardRouter

RECORDS = [
    {
        "problem_id": 7,
        "problem": "What happens?",
        "data_type": "video",
        "problem_type": "multiple choice",
        "options": ["A. a cup falls", "B. nothing"],
        "solution": "<answer>B</answer>",
        "path": "v/1.mp4",
        "data_source": "NExT",
        "pass_rate": 0.5,
    },
    {
        "problem": "Where? <image>",
        "data_type": "image",
        "problem_type": "spatial grounding",
        "answer": [1, 2, 3, 4],
        "images": ["i/1.png"],
        "offline_output": "<think>..</think><answer>[1, 2, 3, 4]</answer>",
        "has_offline_trajectory": True,
    },
    {"problem": "1 + 1?", "data_type": "text", "problem_type": "math", "answer": "2", "has_offline_trajectory": False,
     "offline_output": "unused"},
    {"problem": "Same?", "problem_type": "boolean", "answer": True, "images": ["c.png"],
     "videos": ["a.mp4", {"path": "b.mp4", "start": 2, "end": 5.5, "fps": 1}]},
]  # fmt: skip


def expected(stem):
    return [
        Sample("NExT:7", "What happens?", "B", "multiple choice", "video", ("A. a cup falls", "B. nothing"),
               videos=(MediaRef("v/1.mp4"),), data_source="NExT", extra={"pass_rate": 0.5}),
        Sample(f"{stem}:2", "Where? <image>", "[1, 2, 3, 4]", "spatial grounding", "image", data_source=stem,
               images=(MediaRef("i/1.png"),), offline_output="<think>..</think><answer>[1, 2, 3, 4]</answer>"),
        Sample(f"{stem}:3", "1 + 1?", "2", "math", "text", data_source=stem),
        Sample(f"{stem}:4", "Same?", "yes", "boolean", "mixed", images=(MediaRef("c.png"),), data_source=stem,
               videos=(MediaRef("a.mp4"), MediaRef("b.mp4", 2.0, 5.5, 1.0))),
    ]  # fmt: skip


def write(folder, form):
    path = folder / f"d.{form}"
    lines = "\n".join(json.dumps(record) for record in RECORDS)
    if form == "json":
        path.write_text("[" + ",".join(json.dumps(record) for record in RECORDS) + "]")
    elif form == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(RECORDS).encode()))
    elif form == "jsonl":
        path.write_text(lines + "\n")
    else:
        import datasets

        # Columns have one type each: what differs per record goes as text, as people do.
        keys = {key for record in RECORDS[:3] for key in record}
        rows = [{key: record.get(key) for key in keys} for record in RECORDS[:3]]
        rows[1]["answer"] = json.dumps(rows[1]["answer"])
        data = datasets.Dataset.from_list(rows)
        if form == "parquet":
            data.to_parquet(str(path))
        else:
            path = folder / "d"
            data.save_to_disk(str(path))
    return path


TEXTS = ["a\u2028b", "a\u2029b", "a\u0085b", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1eb", "a\rb", "a\nb"]
"""What some ways of splitting lines take for the end of one."""


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize(
    "name", ["r.json", "r.jsonl", "r.jsonl.gz", "lines.json", "r.csv", "r.tsv.gz", "r.parquet", "folder"]
)
def test_no_character_of_a_text_ends_a_record(tmp_path, name, text):
    rows = [{"a": text, "b": "1"}, {"a": "x", "b": text}]
    path, kind = tmp_path / name, name.removesuffix(".gz").rpartition(".")[2]
    if kind in ("parquet", "folder"):
        import datasets

        data = datasets.Dataset.from_list(rows)
        data.to_parquet(str(path)) if kind == "parquet" else data.save_to_disk(str(path))
    else:
        buffer = io.StringIO(newline="")
        if kind in ("csv", "tsv"):
            table = csv.DictWriter(buffer, ["a", "b"], delimiter="," if kind == "csv" else "\t", quoting=csv.QUOTE_ALL)
            table.writeheader()
            table.writerows(rows)
        elif name == "r.json":
            json.dump(rows, buffer, ensure_ascii=False)
        else:
            buffer.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        content = buffer.getvalue().encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read_records(path)) == [(line, row) for (line, _), row in zip(read_records(path), rows, strict=True)]
    assert read_objects(path) == rows


def test_quarantine_keeps_every_name(tmp_path):
    for text in TEXTS:
        Quarantine(tmp_path / "q.jsonl").add(f"{text}.mp4", "1", f"bad {text}")
    Quarantine(tmp_path / "q.jsonl").clear("no such medium")
    assert [entry["name"] for entry in Quarantine(tmp_path / "q.jsonl").entries()] == [f"{text}.mp4" for text in TEXTS]
    Quarantine(tmp_path / "q.jsonl").clear(f"{TEXTS[0]}.mp4")
    assert len(Quarantine(tmp_path / "q.jsonl").entries()) == len(TEXTS) - 1


def test_options_in_a_cell_of_a_table(tmp_path):
    table = 'problem,problem_type,answer,options\nq,multiple choice,B,"[""A. x"", ""B. y""]"\nq2,mcq,B,A. x B. y\n'
    (tmp_path / "t.csv").write_text(table)
    (samples,), report = load_samples([tmp_path / "t.csv"])
    assert [sample.options for sample in samples] == [("A. x", "B. y")]
    assert "options is text, not a list: 'A. x B. y'" in report.text()


@pytest.mark.parametrize("form", ["json", "json.gz", "jsonl", "parquet", "folder"])
def test_formats(tmp_path, form):
    (samples,), report = load_samples([write(tmp_path, form)])
    wanted = expected("d")
    assert samples == wanted[: len(samples)]
    assert len(samples) == (3 if form in ("parquet", "folder") else 4)
    assert not report.issues


def test_lines_of_an_indented_json_file(tmp_path):
    records = [dict(RECORDS[2]), {"problem": "x"}, dict(RECORDS[2], problem="2 + 2?")]
    (tmp_path / "d.json").write_text(json.dumps(records, indent=2))
    (samples,), report = load_samples([tmp_path / "d.json"])
    assert [sample.uid for sample in samples] == ["d:1", "d:3"]
    assert [(issue.line, issue.kind) for issue in report.issues] == [(10, "missing field")]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("<answer>B</answer>", "B"),
        ("<think>hm <answer>A</answer></think><answer> C </answer>", "C"),
        ('<think>{"time": [1, 2]}</think><[broken]>', '{"time": [1, 2]}'),
        ("<think>because</think> 42", "42"),
        ([2.0, 5.5], "[2.0, 5.5]"),
        ({"time": [1, 2]}, '{"time": [1, 2]}'),
        (3, "3"),
        (False, "no"),
        (" plain ", "plain"),
    ],
)
def test_answers_lose_their_tags(value, answer):
    assert clean_answer(value) == answer


def bad(**changes):
    return {"problem": "q", "problem_type": "math", "answer": "1", **changes}


def known_type(name):
    if name == "astrology":
        raise ValueError("unknown problem_type 'astrology'")
    return name


def test_one_report_with_lines(tmp_path):
    lines = [
        bad(problem_id="ok"),
        bad(problem_type="astrology"),
        {"problem": "q", "problem_type": "math"},
        bad(problem_type="multiple choice", options=["A. x", "B. y"], answer="C"),
        bad(problem_type="multiple choice", options=["A. x", "B. y"], answer="y"),
        bad(problem_id="ok"),
        bad(problem_id="ok", problem="other"),
        bad(data_type="video"),
        bad(videos=[{"path": "a.mp4", "start": 5, "end": 2}]),
        "not json",
        bad(offline_output=["<answer>1</answer>"]),
    ]
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "d.jsonl").write_text(text)
    (samples,), report = load_samples([tmp_path / "d.jsonl"], known_type)
    found = [(issue.line, issue.kind, issue.dropped) for issue in report.issues]
    assert found == [
        (2, "unknown problem type", True),
        (3, "missing field", True),
        (4, "gold not in options", True),
        (6, "duplicate id", True),
        (7, "duplicate id", False),
        (8, "bad field", True),
        (9, "bad field", True),
        (10, "not a record", True),
        (11, "bad field", True),
    ]
    assert [sample.uid for sample in samples] == ["d:ok", "d:5", "d:ok#d:7"]
    assert report.num_dropped == 8
    assert "d.jsonl:4: gold not in options: 'C' not among ['A. x', 'B. y']" in report.text()
    with pytest.raises(ValueError, match=r"strict=true(.|\n)*unknown problem type: 1"):
        load_samples([tmp_path / "d.jsonl"], known_type, strict=True)
    (samples,), report = load_samples([tmp_path / "d.jsonl"])
    assert "unknown problem type" not in report.counts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("d.xml", "a,b", "unknown extension"),
        ("d.json", "[{", "line 1"),
        ("d.json", '[{"a": 1}', "ends inside its array"),
        ("d.json", "3", "neither a JSON array"),
        ("d.parquet", "xxxx", "not a readable Parquet"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_samples([tmp_path / name])


def test_reference_annotation_files_load(shared_data):
    """Published benchmark files in the common record format, read as they are."""
    folder = shared_data / "eval" / "annotations"
    # The files that keep to the common fields; others need their benchmark's adapter.
    for path in sorted(set(folder.glob("*.gz")) - {folder / "videommlu.json.gz"}):
        (samples,), report = load_samples([path], RewardRouter().type_name)
        assert report.num_records > 50, path.name
        lost = report.num_dropped / report.num_records
        assert lost < 0.02, f"{path.name}: {report.text(5)}"
        assert len({sample.uid for sample in samples}) == len(samples)
    (charades,), _ = load_samples([folder / "charades_sta.json.gz"])
    assert json.loads(charades[0].answer)["time"] == [24.296875, 30.40625]


def with_rates(rates):
    return [Sample(str(i), "q", "1", "math", "text", extra={"pass_rate": rate}) for i, rate in enumerate(rates)]


def test_curriculum_goes_from_easy_to_hard():
    rates = [0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.6]
    order = CurriculumOrder(with_rates(rates), seed=1, bands=4, epochs=2)
    first = [rates[i] for i in order.epoch(0)]
    assert [sorted(first[i : i + 2]) for i in (0, 2, 4, 6)] == [[0.8, 0.9], [0.6, 0.7], [0.3, 0.5], [0.1, 0.2]]
    assert order.epoch(0).tolist() == order.epoch(0).tolist()
    assert sorted(order.epoch(2).tolist()) == list(range(8))
    hard = CurriculumOrder(with_rates(rates), bands=8, easy_first=False)
    assert [rates[i] for i in hard.epoch(5)] == sorted(rates)
    with pytest.raises(ValueError, match="1 of 2 samples have no number 'pass_rate', for example 1"):
        CurriculumOrder(with_rates([0.5, None]))


def test_length_groups_hold_similar_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 10_000, 203)
    samples = with_rates([0.5] * 203)
    grouped = LengthGroupedOrder(samples, seed=2, lengths=lengths, batch_size=8, group=10)
    plain = LengthGroupedOrder(samples, seed=2, lengths=lengths, batch_size=8, group=1)

    def spread(order):
        batches = order.epoch(0)[:200].reshape(-1, 8)
        return np.mean([np.ptp(lengths[batch]) for batch in batches])

    assert Counter(grouped.epoch(3).tolist()) == Counter(range(203))
    assert spread(grouped) < 0.2 * spread(plain)
    assert grouped.epoch(0).tolist() != grouped.epoch(1).tolist()


def test_record_with_times_at_top_level():
    record = {
        "problem": "q",
        "problem_type": "math",
        "answer": "1",
        "video": "a.mp4",
        "video_start": 1,
        "video_end": "2.5",
    }
    assert to_sample(record, "f.json", 3).videos == (MediaRef("a.mp4", 1.0, 2.5),)
