"""The preparation script: what is missing and where it belongs, archives, what is there."""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests import eval_official_files

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "prepare_benchmarks.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_files_it_says_which_to_put_where(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert script.main(["videomme", "mvbench", "--data-root", str(tmp_path), "--offline"]) == 1
    said = capsys.readouterr().out
    assert "get them from: lmms-lab/Video-MME" in said
    assert f"below {tmp_path}/videomme/:" in said
    assert "videomme/test-00000-of-00001.parquet" in said
    assert f"{tmp_path}/videomme/data/{{videoID}}.mp4" in said
    assert "json/counterfactual_inference.json" in said


def test_without_a_network_it_explains_too(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert script.main(["lvbench", "--data-root", str(tmp_path), "--annotations-only"]) == 1
    said = capsys.readouterr().out
    assert "zai-org/LVBench: could not be fetched" in said
    assert "video_info.meta.jsonl" in said


def test_what_is_there_is_counted(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    eval_official_files.write(tmp_path, "videomme")
    assert script.main(["videomme", "--data-root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "videomme: 3 questions (official files), official number 2700" in said
    assert "1 media files are missing" in said


def test_archives_are_unpacked_once(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "clip.txt").write_text("clip")
    with tarfile.open(tmp_path / "videos.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "clip.txt", arcname="videos/clip.txt")
    (tmp_path / "big.tar.part.aa").write_bytes(b"x")
    with zipfile.ZipFile(tmp_path / "subtitle.zip", "w") as archive:
        archive.writestr("subtitle/a.srt", "1")
        archive.writestr("../outside.txt", "2")
    script.unpack(tmp_path)
    assert (tmp_path / "videos" / "clip.txt").read_text() == "clip"
    assert "big.tar.part.aa is a part of a split archive" in capsys.readouterr().out
    assert (tmp_path / "subtitle" / "a.srt").read_text() == "1"
    assert not (tmp_path.parent / "outside.txt").exists()
    (tmp_path / "subtitle" / "a.srt").write_text("changed")
    script.unpack(tmp_path)
    assert (tmp_path / "subtitle" / "a.srt").read_text() == "changed"


def test_half_an_archive_is_named_and_videos_that_lack_are_unpacked_when_they_come(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    eval_official_files.write(tmp_path, "videomme")
    archive = tmp_path / "videomme" / "videos_chunked_01.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("data/vid_a.mp4", "video")
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-30])
    options = ["videomme", "--data-root", str(tmp_path), "--offline"]
    assert script.main(options) == 0
    said = capsys.readouterr().out
    assert f"{archive} cannot be unpacked (File is not a zip file); the same command tries again" in said
    assert "1 media files are missing" in said
    archive.write_bytes(whole)
    assert script.main(options) == 0
    said = capsys.readouterr().out
    assert f"unpacked {archive}" in said
    assert "missing" not in said
    (tmp_path / "videomme" / "videomme" / "test-00000-of-00001.parquet").write_bytes(b"half")
    assert script.main(options) == 1
    assert "is not a readable Parquet file" in capsys.readouterr().out


def test_an_unknown_name_names_the_nearest(script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script.main(["video-mme"])
    assert "did you mean videomme" in capsys.readouterr().err
