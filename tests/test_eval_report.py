"""Reports say what a number rests on: counts, comparability, deltas; model text cannot break the page."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from datamodules.common.files import write_lines
from eval.report.rows import count_text, published_text, rows
from eval.report.write import read_report, write_reports

EVIL = "</script><script>alert(1)</script> | pipe"


def result(folder: Path, value: float = 60.0, **changes) -> dict:
    record = {
        "benchmark": "videomme",
        "title": "Video-MME",
        "category": "general",
        "model": "tiny",
        "key": "abcd1234",
        "folder": str(folder),
        "split": "test",
        "headline": {"accuracy": value},
        "robust_headline": {"accuracy": value + 5},
        "tables": {"duration": {"short": {"value": value, "n": 2}, "long": {"value": None, "n": 1}}},
        "robust_tables": {},
        "counts": {"n_expected": 3, "n_items": 3, "n_ok": 1, "n_failed": 1, "n_unparsed": 1, "n_not_judged": 0},
        "comparable": False,
        "reason": "the run is partial",
        "published": {"value": 71.4, "source": "report", "metric": "accuracy", "model": "tiny"},
        "is_partial": True,
        "notes": [],
        "unasked": 0,
        "settings": {"model": "m1", "style": "official", "seed": 0},
        "disagreement": {},
        "written": "2026-01-01T00:00:00",
    }
    return record | changes


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "videomme-abcd1234"
    media = [{"path": "/data/a.mp4", "start": None, "end": None, "fps": None}]
    sample = {"problem": f"What? {EVIL}", "answer": "B", "videos": media, "images": []}
    write_lines(folder / "items.jsonl", [{"uid": f"videomme:{i}", "sample": sample} for i in range(3)])
    answers = [
        {"uid": "videomme:0", "state": "answered", "response": "B", "thumbnail": "x.jpg", "frames": 4},
        {"uid": "videomme:1", "state": "answered", "response": EVIL},
        {"uid": "videomme:2", "state": "failed", "reason": "/data/a.mp4: damaged"},
    ]
    write_lines(folder / "answers.jsonl", answers)
    good = {"accuracy": 1.0, "format": 1.0, "total": 1.0, "parts": {}, "status": "ok", "reason": ""}
    scores = [
        {"uid": "videomme:0", "state": "ok", "official": good, "robust": good, "reason": ""},
        {"uid": "videomme:1", "state": "unparsed", "official": None, "robust": None, "reason": "no letter"},
        {"uid": "videomme:2", "state": "failed", "official": None, "robust": None, "reason": "/data/a.mp4: damaged"},
    ]
    write_lines(folder / "scores.jsonl", scores)
    (folder / "frames").mkdir()
    (folder / "frames" / "x.jpg").write_bytes(b"\xff\xd8jpeg")
    return folder


def test_page_is_one_file_holds_the_items_and_cannot_be_broken_by_a_model(tmp_path, run_folder):
    write_reports([result(run_folder)], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert page.count("</script>") == 2
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    items = json.loads(text)["benchmarks"][0]["items"]
    # Failed first, then unparsed, then the right one.
    assert [(item["uid"], item["kind"]) for item in items] == [
        ("videomme:2", "failed"),
        ("videomme:1", "unparsed"),
        ("videomme:0", "right"),
    ]
    assert items[1]["answer"] == EVIL
    assert items[0]["reason"] == "/data/a.mp4: damaged"
    assert items[2]["picture"].startswith("data:image/jpeg;base64,")
    assert items[2]["media"] == ["a.mp4"]


def test_counts_and_comparability_stand_beside_the_number(tmp_path, run_folder):
    record = result(run_folder)
    assert count_text(record) == "n_expected=3 n_ok=1 n_failed=1 n_unparsed=1 PARTIAL"
    assert published_text(record) == "not comparable: the run is partial"
    assert published_text(record | {"comparable": True}) == "71.4 (report)"
    other = record | {"comparable": True, "published": record["published"] | {"metric": "realtime"}}
    assert published_text(other) == "realtime 71.4 (report)"
    text = write_reports([record], tmp_path)
    assert "videomme  accuracy    60.0  n_expected=3 n_ok=1 n_failed=1 n_unparsed=1 PARTIAL" in text
    assert "robust extraction 65.0" in text
    assert "71.4" not in text
    assert "71.4" not in (tmp_path / "report.md").read_text()


def test_deltas_against_a_baseline_and_what_differs(tmp_path, run_folder):
    base = result(run_folder, 50.0, model="base")
    base["settings"] = {"model": "m0", "style": "cot", "seed": 0}
    write_reports([base], tmp_path / "base", num_items=0)
    (row,) = rows([result(run_folder)], read_report(tmp_path / "base"))
    assert (row.value, row.baseline, row.delta) == (60.0, 50.0, 10.0)
    assert row.baseline_note == "style"
    text = write_reports([result(run_folder)], tmp_path, baseline=tmp_path / "base")
    assert "+10.0 against the baseline" in text
    markdown = (tmp_path / "report.md").read_text()
    assert "| short | 60.0 | 2 | +10.0 |" in markdown
    assert "| long | not judged | 1 |  |" in markdown
    assert "other settings (style)" in markdown
    with pytest.raises(ValueError, match=r"holds report\.json"):
        read_report(tmp_path / "nothing")
    (tmp_path / "report.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"report.json is not a report \(KeyError: 'results'\)"):
        read_report(tmp_path)


def test_long_texts_keep_their_end():
    from eval.report.items import MAX_TEXT, shortened

    text = "start " + "x" * MAX_TEXT + " the answer is B"
    shown = shortened(text)
    assert shown.startswith("start x")
    assert shown.endswith(" the answer is B")
    assert f"[{len(text) - MAX_TEXT} characters are not shown]" in shown
    assert shortened("short") == "short"


def test_a_figure_without_a_judge_is_not_zero(tmp_path, run_folder):
    record = copy.deepcopy(result(run_folder))
    record["headline"] = record["robust_headline"] = {"accuracy": None}
    assert "not judged" in write_reports([record], tmp_path)


def test_tensorboard_scalars(tmp_path, run_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_reports([result(run_folder)], tmp_path, tensorboard_step=7)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("eval/videomme/accuracy")
    assert (event.step, event.value) == (7, 60.0)
    assert events.Scalars("eval_counts/videomme/n_failed")[0].value == 1
    assert "eval_groups/videomme/duration/long/accuracy" not in events.Tags()["scalars"]
