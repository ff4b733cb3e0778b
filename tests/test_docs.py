"""What the pages name exists."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(?<![\w/])(?:datamodules|rollout|rewards|eval|lightning_modules|scripts|conf|tests)/[\w/.-]+\.\w+")
"""A file of the project, as pages write it; folders and patterns with a * are left out."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    named = set(PLACE.findall(page.read_text(encoding="utf-8")))
    assert sorted(place for place in named if not (ROOT / place.rstrip(".")).exists()) == []


def test_the_pattern_finds_files():
    found = PLACE.findall("see `eval/run/pool.py`, scripts/bench/data.py, mine/model/mine.yaml and conf/model/*.yaml")
    assert found == ["eval/run/pool.py", "scripts/bench/data.py"]
