"""Paths that the docs name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
FOLDERS = "proto|kernels|worker|scheduler|cluster|tests|benchmarks|docs|examples"
IN_CODE = re.compile(rf"`((?:{FOLDERS})/[\w/.-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_names_paths_that_exist(page: Path) -> None:
    text = (ROOT / page).read_text()
    named = {ROOT / name for name in IN_CODE.findall(text)}
    linked = {ROOT / page.parent / name for name in LINK.findall(text)}
    assert sorted(str(path) for path in named | linked if not path.exists()) == []
