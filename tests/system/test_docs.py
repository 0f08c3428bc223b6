"""Paths that the docs name exist, and the site shows whole lines of code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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


def test_threat_model_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_site_wraps_lines_of_code() -> None:
    """The theme cuts lines of 118 characters at 1,200 px."""
    (sheet,) = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["extra_css"]
    rules = re.findall(r"^([^{\n]+) \{(.*)\}$", (ROOT / "docs" / sheet).read_text(), re.MULTILINE)
    assert "white-space: pre-wrap" in dict(rules)[".md-typeset pre > code"]
