"""Relative media paths of several annotation files with different homes."""

from __future__ import annotations

from datamodules.roots import anchor
from datamodules.types import MediaRef, Sample


def sample(*paths: str) -> Sample:
    return Sample("a", "q", "1", "numerical", "video", videos=tuple(MediaRef(p) for p in paths))


def test_paths_below_the_media_root_stay_relative(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.mp4").touch()
    samples = [sample("a.mp4"), sample("missing.mp4")]
    assert anchor(samples, tmp_path / "train.json", tmp_path / "media") == samples


def test_a_file_whose_media_lie_beside_it_gets_absolute_paths(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "b.mp4").touch()
    found = anchor([sample("b.mp4", "/x/c.mp4")], tmp_path / "held_out" / "val.jsonl", tmp_path / "root")
    assert [ref.path for ref in found[0].videos] == [str(tmp_path / "held_out" / "b.mp4"), "/x/c.mp4"]


def test_media_found_nowhere_are_left_for_the_report(tmp_path):
    samples = [sample("gone.mp4")]
    assert anchor(samples, tmp_path / "train.json", tmp_path) == samples


def test_without_a_media_root_the_files_own_folder_counts(tmp_path):
    (tmp_path / "a.mp4").touch()
    found = anchor([sample("a.mp4")], tmp_path / "train.json", None)
    assert found[0].videos[0].path == str(tmp_path / "a.mp4")
