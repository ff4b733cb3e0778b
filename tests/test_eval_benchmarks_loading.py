"""Loading: official and normalised files, checks of what is on disk, clips, subtitles, status."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from datamodules.records import read_objects
from datamodules.types import MediaRef
from datamodules.video.probe import probe
from datamodules.video.spec import VideoSpec
from eval.benchmarks import catalogue
from eval.benchmarks.comparison import summarise
from eval.benchmarks.drafts import gold_of
from eval.benchmarks.frame_policy import frame_options
from eval.benchmarks.loading import file_status, load
from tests import eval_official_files
from tests.data_media import numbered_frames, write_video
from tests.eval_helpers import scored, write_json, write_jsonl, write_parquet

# name: (questions in the reference's file, official number or None)
REFERENCE = {
    "videomme": (2700, 2700),
    "mvbench": (3586, 4000),
    "motionbench": (4018, 4018),
    "lvbench": (1492, 1549),
    "longvideobench": (1337, 1337),
    "mlvu": (2174, 2174),
    "mlvu_test": (502, 502),
    "holmes": (1837, 1837),
    "minerva": (1431, None),
    "vcrbench": (1034, 1034),
    "videoreasonbench": (1440, 1440),
    "longvideoreason": (851, None),
    "mmvu": (1000, 1000),
    "videommmu": (900, 900),
    "videomathqa": (420, 420),
    "videomathqa_mbin": (1680, 1680),
    "vsibench": (5130, 5130),
    "charades_sta": (3720, 3720),
    "stvg": (2000, 2000),
    "ovobench": (3035, 3035),
    "livesports3k_qa": (1174, 1174),
}


# Sizes of the official subgroups: name -> (field, counts)
GROUPS = {
    "ovobench": (
        "task",
        {
            **{"EPM": 297, "ASI": 148, "HLD": 186, "STU": 178, "OJR": 184, "ATR": 116, "ACR": 109, "OCR": 149},
            **{"FPD": 101, "REC": 698, "SSR": 629, "CRR": 240},
        },
    ),
    "videommmu": ("track", {"Perception": 300, "Comprehension": 300, "Adaptation": 300}),
    "livesports3k_qa": ("q_type_livesports", {"What": 465, "Who": 374, "When": 335}),
    "videomme": ("duration", {"short": 900, "medium": 900, "long": 900}),
}


def annotations(shared_data: Path) -> Path:
    return shared_data / "eval" / "annotations"


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_files_are_complete_or_say_what_lacks(shared_data: Path, name: str) -> None:
    found, official = REFERENCE[name]
    items, report = load(catalogue.get(name), annotations(shared_data))
    assert (report.n, len(items), report.expected_n, report.source) == (found, found, official, "reference")
    assert report.is_partial == (official is not None and found < official)
    assert len({item.uid for item in items}) == found
    assert all(item.uid == item.sample.uid and item.uid.startswith(f"{name}:") for item in items)
    assert len(report.gold_missing) == (240 if name == "videoreasonbench" else 0)
    assert len(report.duplicates) == (5 if name == "livesports3k_qa" else 0)
    for item in items:
        letters = [option[0] for option in item.sample.options]
        assert not letters or item.sample.answer in letters
    field, counts = GROUPS.get(name, ("", {}))
    assert Counter(item.meta[field] for item in items if field) == counts
    stored = {key for item in items[:50] for key in item.meta}
    assert {"problem", "solution", "path"} <= stored


# name: (uids, golds) of the small official files
OFFICIAL = {
    "videomme": (["001-1", "001-2", "001-3"], ["A", "B", "C"]),
    "videomme_v2": (["001-1", "001-2", "001-3", "001-4"], ["A", "B", "C", "H"]),
    "tempcompass": (
        [
            "multi-choice-1021488277-0",
            "yes_no-1021488277-0",
            "caption_matching-1021488277-0",
            "captioning-1021488277-0",
        ],
        ["B. walking", "yes", "Option 1: He walks.", "B. walking"],
    ),
    "motionbench": (["m1"], ["C"]),
    "lvbench": (["1"], ["D"]),
    "longvideobench": (["86Cx_0"], ["B"]),
    "mlvu_test": (["0"], ["F"]),
    "holmes": (["17"], ["F"]),
    "minerva": (["--C2:5"], ["C"]),
    "vcrbench": (["0", "1", "2"], ["Kitchen", "B", "[10, 20]"]),
    "longvideoreason": (["0"], ["B"]),
    "mmvu": (["validation_0", "validation_1"], ["A", "Dolly zoom"]),
    "videommmu": (
        [
            "Perception-dev_Biology_3",
            "Comprehension-dev_Biology_3",
            "Adaptation-dev_Biology_3",
            "Adaptation-dev_Math_1",
        ],
        ["B", "B", "B", "12.97"],
    ),
    "videomathqa": (["q-60"], ["C"]),
    "videomathqa_mbin": (["q-60-0", "q-60-1"], ["B", "B"]),
    "vsibench": (["0", "1"], ["4", "A"]),
    "charades_sta": (["0"], ["[1.5, 6.0]"]),
    "ovobench": (["0", "1_0", "1_1", "2_0", "3_0"], ["B", "1", "2", "Yes", "No"]),
    "livesports3k_qa": (["I0rO_e10_q1"], ["A"]),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_files(tmp_path: Path, name: str) -> None:
    uids, golds = OFFICIAL[name]
    items, report = load(catalogue.get(name), eval_official_files.write(tmp_path, name))
    assert [item.uid for item in items] == [f"{name}:{uid}" for uid in uids]
    assert [item.sample.answer for item in items] == golds
    assert (report.source, report.gold_missing, report.duplicates) == ("official", (), ())
    assert report.is_partial == (report.expected_n is not None)
    assert report.missing_media
    assert all(Path(path).is_absolute() for path in report.missing_media)


def test_every_official_field_is_kept(tmp_path: Path) -> None:
    items, _ = load(catalogue.get("lvbench"), eval_official_files.write(tmp_path, "lvbench"))
    meta = items[0].meta
    assert meta["time_reference"] == "00:15-00:19"
    assert meta["question_type"] == ["reasoning", "entity recognition"]
    assert (meta["type"], meta["key"]) == ("documentary", "Cm73")
    items, _ = load(catalogue.get("mlvu"), eval_official_files.write(tmp_path, "mlvu"))
    assert [item.meta["_task"] for item in items] == list(catalogue.get("mlvu").macro_groups)
    assert {item.meta["duration"] for item in items} == {480.0}


def test_captions_know_their_choice_question_and_fine_aspect(tmp_path: Path) -> None:
    items, _ = load(catalogue.get("tempcompass"), eval_official_files.write(tmp_path, "tempcompass"))
    caption = items[3]
    assert caption.sample.extra["mc_question"] == "What is the man doing?\nA. running\nB. walking"
    assert (caption.meta["aspect"], caption.meta["dim"], caption.meta["format"]) == (
        "coarse-grained action",
        "action",
        "captioning",
    )


def test_clips_have_exact_ends(tmp_path: Path) -> None:
    def first(name: str) -> MediaRef:
        return load(catalogue.get(name), eval_official_files.write(tmp_path, name))[0][0].sample.videos[0]

    assert (first("mvbench").start, first("mvbench").end) == (2.5, 9.0)
    assert (first("odvbench").start, first("odvbench").end) == (0.0, 7.5)
    assert (first("livesports3k_qa").start, first("livesports3k_qa").end) == (300.745, 350.676)
    assert (first("ovobench").start, first("ovobench").end) == (None, 12.0)


def test_ready_cut_clips_are_used_whole_where_only_they_are_there(tmp_path: Path) -> None:
    record = {
        "problem": "When?",
        "options": ["A: now", "B: later"],
        "solution": "<answer>A</answer>",
        "path": "I0rO_1_300.745_350.676.mp4",
        "problem_id": "x",
    }
    write_json(tmp_path / "livesports3k_qa.json", [record])
    benchmark = catalogue.get("livesports3k_qa")
    video = load(benchmark, tmp_path)[0][0].sample.videos[0]
    assert (Path(video.path).name, video.start, video.end) == ("I0rO_1.mp4", 300.745, 350.676)
    (tmp_path / record["path"]).write_bytes(b"clip")
    video = load(benchmark, tmp_path)[0][0].sample.videos[0]
    assert (Path(video.path).name, video.start, video.end) == (record["path"], None, None)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "I0rO_1.mp4").write_bytes(b"whole")
    video = load(benchmark, tmp_path)[0][0].sample.videos[0]
    assert (Path(video.path).parent.name, video.start) == ("videos", 300.745)


def test_bad_records_are_reported(tmp_path: Path) -> None:
    good = {"key": "k", "type": "t", "qa": []}
    question = "Which?\n(A) one\n(B) two"
    rows = [
        {"uid": "1", "question": question, "answer": "A", "question_type": []},
        {"uid": "1", "question": question, "answer": "B", "question_type": []},
        {"uid": "2", "question": question, "answer": "E", "question_type": []},
    ]
    write_jsonl(tmp_path / "lvbench" / "video_info.meta.jsonl", [{**good, "qa": rows}])
    items, report = load(catalogue.get("lvbench"), tmp_path)
    assert [item.uid for item in items] == ["lvbench:1", "lvbench:1#2", "lvbench:2"]
    assert report.duplicates == ("lvbench:1#2",)
    assert report.gold_missing == ("lvbench:2",)
    assert report.missing_media == (str(tmp_path / "lvbench" / "videos" / "k.mp4"),)
    assert report.is_partial
    assert any("3 questions in the files, 1549 were expected" in note for note in report.notes)


def test_limit_and_available_only_make_a_run_partial(shared_data: Path, tmp_path: Path) -> None:
    benchmark = catalogue.get("charades_sta")
    items, report = load(benchmark, annotations(shared_data), limit=7)
    assert (len(items), report.n, report.is_partial) == (7, 7, True)
    for name in ("charades_sta", "stvg"):
        (tmp_path / name).symlink_to(shared_data / "videos")
        (tmp_path / f"{name}.json.gz").symlink_to(annotations(shared_data) / f"{name}.json.gz")
    items, report = load(benchmark, tmp_path, available_only=True)
    assert report.is_partial
    assert report.missing_media == ()
    assert {Path(item.sample.videos[0].path).name for item in items} == {"0F7LW.mp4", "5INX3.mp4"}
    items, report = load(catalogue.get("stvg"), tmp_path, available_only=True)
    names = {Path(item.sample.videos[0].path).name for item in items}
    assert names == {"stvg_8670554760.mp4", "svg_3843663025.mp4"}
    size = probe(items[0].sample.videos[0].path)
    assert (items[0].sample.extra["width"], items[0].sample.extra["height"]) == (size.width, size.height)
    assert items[0].sample.extra["answer_coordinates"] == "relative1000"


def test_frames_and_boxes_of_the_official_grounding_file_become_seconds(tmp_path: Path) -> None:
    eval_official_files.write(tmp_path, "stvg")
    (tmp_path / "stvg" / "videos").mkdir()
    write_video(tmp_path / "stvg" / "videos" / "8670554760.mp4", numbered_frames(95), fps=30)
    items, report = load(catalogue.get("stvg"), tmp_path)
    assert report.gold_missing == ()
    assert json.loads(items[0].sample.answer) == {
        "time": [1.0, 2.0],
        "boxes": {"1": [64, 36, 128, 72], "2": [64, 36, 128, 72]},
    }
    assert (items[0].sample.videos[0].start, items[0].sample.videos[0].end) == (0.0, 3.0)
    assert "<video>" not in items[0].sample.extra["question"]


def test_missing_files_and_wrong_names_say_what_to_do(tmp_path: Path) -> None:
    benchmark = catalogue.get("videomme")
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet.*prepare_benchmarks.py videomme"):
        load(benchmark, tmp_path)
    with pytest.raises(ValueError, match=r"no split 'train'; it has test"):
        load(benchmark, tmp_path, split="train")
    with pytest.raises(ValueError, match=r"videomme has no source 'oficial' for its split test; it has official, ref"):
        load(benchmark, tmp_path, source="oficial")
    with pytest.raises(ValueError, match=r"no benchmark is called 'video_mme': did you mean .*videomme"):
        catalogue.get("video_mme")


def test_status_tells_what_is_there(tmp_path: Path) -> None:
    benchmark = catalogue.get("mvbench")
    (status,) = file_status(benchmark, tmp_path)
    assert (status.ready, status.source, len(status.missing)) == (False, None, 20)
    assert status.missing[0] == "mvbench/json/action_sequence.json"
    eval_official_files.write(tmp_path, "mvbench")
    (tmp_path / "mvbench" / "json" / "state_change.json").unlink()
    (status,) = file_status(benchmark, tmp_path)
    assert (status.ready, status.missing) == (False, ("mvbench/json/state_change.json",))
    eval_official_files.write(tmp_path, "mvbench")
    (status,) = file_status(benchmark, tmp_path)
    assert (status.ready, status.source, status.expected_n, len(status.found)) == (True, "official", 4000, 20)


def test_the_list_holds_22_benchmarks_and_their_variants() -> None:
    assert len(catalogue.names(variants=False)) == 22
    assert catalogue.select("all") == catalogue.names(variants=False)
    assert catalogue.select(["videomme_sub"]) == ["videomme_sub"]
    from rewards.official import official_benchmarks

    for name in catalogue.names():
        benchmark = catalogue.get(name)
        assert benchmark.name == name
        assert benchmark.scorer in official_benchmarks()
        assert benchmark.split in benchmark.expected
        assert all(benchmark.split in source.files for source in benchmark.sources)
        VideoSpec(**frame_options("official", benchmark.frames))


@pytest.mark.parametrize("bases", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}])
def test_bases_that_lead_back_to_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bases: dict[str, str]
) -> None:
    monkeypatch.setenv("EVR1_CONFIG_DIR", str(tmp_path))
    (tmp_path / "benchmark").mkdir()
    for name, base in bases.items():
        (tmp_path / "benchmark" / f"{name}.yaml").write_text(f"base: {base}\nname: {name}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a -> .*a is a circle"):
        catalogue.get("a")


@pytest.mark.parametrize(
    ("answer", "texts", "gold"),
    [
        ("*p", ("p", "*p"), "B"),  # the very text goes before one that differs in marks or case
        ("Left", ("left", "Left"), "B"),
        ("left.", ("right", "Left"), "B"),
        ("[10, 20]", ("[10, 2]", "[10, 20]"), "B"),
    ],
)
def test_a_gold_text_is_found_among_the_options(answer: str, texts: tuple[str, ...], gold: str) -> None:
    assert gold_of(answer, texts, "text") == (gold, True)


def test_readers_read_every_format(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "x\ty"}, {"a": "2", "b": "z"}]
    (tmp_path / "r.csv").write_text('a,b\n1,"x\ty"\n2,z\n', encoding="utf-8")
    (tmp_path / "r.tsv").write_text('a\tb\n1\t"x\ty"\n2\tz\n', encoding="utf-8")
    paths = [
        write_json(tmp_path / "r.json", rows),
        write_json(tmp_path / "wrapped.json", {"version": 1, "data": rows}),
        write_jsonl(tmp_path / "r.jsonl", rows),
        write_jsonl(tmp_path / "lines.json", rows),
        write_parquet(tmp_path / "r.parquet", rows),
        tmp_path / "r.csv",
        tmp_path / "r.tsv",
    ]
    packed = tmp_path / "r.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(rows).encode()))
    for path in (*paths, packed):
        assert read_objects(path) == rows, path.name
    doubled = tmp_path / "doubled.jsonl"
    doubled.write_text("".join(json.dumps(json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    assert read_objects(doubled) == rows
    keyed = write_json(tmp_path / "keyed.json", {"k1": {"a": 1}, "k2": {"a": 2}})
    assert read_objects(keyed) == [{"_key": "k1", "a": 1}, {"_key": "k2", "a": 2}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json, line 1: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n{', r"a.jsonl, line 2: not a JSON object"),
        ("a.json", '["x"]', "a.json, line 1: not a JSON object"),
        ("a.parquet", "x", "a.parquet is not a readable Parquet"),
        ("a.xml", "x", "a.xml: unknown extension"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_objects(tmp_path / name)


def test_a_damaged_file_does_not_end_the_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    from lightning_modules.launch.benchmarks import print_list

    (tmp_path / "stvg").mkdir()
    (tmp_path / "stvg" / "stvg.json").write_text("[{")  # whose it is would be seen in its first record
    with caplog.at_level(logging.INFO, logger="evaluate"):
        assert print_list(str(tmp_path)) == 0
    (line,) = (line for line in caplog.messages if line.startswith("stvg "))
    assert line.endswith("there (reference)")
    with pytest.raises(ValueError, match=r"stvg.json, line 1: not valid JSON"):
        load(catalogue.get("stvg"), tmp_path)


def test_a_half_download_is_named(tmp_path: Path) -> None:
    import gzip

    whole = gzip.compress(b'[{"a": 1}]' * 50)
    for name, data in (("a.json.gz", whole[:-9]), ("b.json.gz", b"plain"), ("c.json", b"\xff\xfe\xfa")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            read_objects(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "file", "record"),
    [
        ("ovobench", "ovo_bench_new.json", {"id": 1, "task": "EPM", "video": "v.mp4"}),
        ("livesports3k_qa", "LiveSports-3K-QA.json", {"question_id": 1, "begin": "early", "options": ["A: x"]}),
        ("stvg", "stvg.json", {"video_path": "v.mp4", "conversations": [], "meta": {"split": [0, 1]}}),
        ("tempcompass", "questions/captioning.json", {"video_id": "1"}),
        ("mmvu", "validation.json", {"id": "1", "choices": 7}),
    ],
)
def test_records_that_lack_what_a_question_needs_name_their_file(
    tmp_path: Path, name: str, file: str, record: dict
) -> None:
    eval_official_files.write(tmp_path, name)
    (path,) = [*(tmp_path / name).rglob(Path(file).name)] or [tmp_path / name / file]
    write_json(path, [record])
    with pytest.raises(ValueError, match=rf"cannot read record 0 of {path.parent.name}/{path.stem}: \w+Error: "):
        load(catalogue.get(name), tmp_path)


def test_a_part_of_a_file_is_partial_also_where_the_official_number_is_not_known(
    shared_data: Path, tmp_path: Path
) -> None:
    import gzip

    records = json.loads(gzip.decompress((annotations(shared_data) / "minerva.json.gz").read_bytes()))
    write_json(tmp_path / "minerva" / "minerva.json", records[:20])
    _, report = load(catalogue.get("minerva"), tmp_path)
    assert (report.n, report.expected_n, report.is_partial) == (20, None, True)


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    import yaml
    from hydra.utils import instantiate

    text = (Path(__file__).resolve().parents[1] / "docs" / "adding-a-benchmark.md").read_text(encoding="utf-8")
    benchmark = instantiate(yaml.safe_load(text.split("```yaml")[1].split("```")[0]), _convert_="all")
    row = {"question": "Which?", "options": ["A. one", "B. two"], "answer": "B", "video": "v", "task": "count"}
    clip = {"question_id": "q2", "clip_start": 1.0, "clip_end": 2.5, "task": "order"}
    write_jsonl(tmp_path / "mybench" / "questions.jsonl", [{**row, "question_id": "q1"}, {**row, **clip}])
    items, report = load(benchmark, tmp_path)
    assert (report.n, report.is_partial, report.gold_missing) == (2, False, ())
    assert items[1].sample.problem == "<video>\nWhich?\nA. one\nB. two\nAnswer with the letter (A or B)."
    assert items[1].sample.videos == (MediaRef(str(tmp_path / "mybench" / "videos" / "v.mp4"), 1.0, 2.5),)
    summary = summarise(benchmark, [scored(1.0, items[0]), scored(0.0, items[1])])
    assert (summary.headline["accuracy"], summary.is_partial) == (50.0, False)
