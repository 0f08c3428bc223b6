"""Line counts of the source."""

from __future__ import annotations

import re

import pytest

from benchmarks.size import ROOT, count_source, num_code_lines

SOURCE = '''"""A module's
docstring."""

import os  # a comment


def choose(a: int, b: int) -> int:
    """A docstring."""
    # a comment
    if a and b:
        return (
            a
        )
    return b if b else 0
'''


def test_code_lines_leave_out_docstrings_comments_and_blank_lines() -> None:
    assert num_code_lines(SOURCE) == 7


def test_readme_states_the_counts() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    stated = re.search(
        r"has ([\d,]+) lines of Python and ([\d,]+) of C\+\+, the cluster around it ([\d,]+)", text
    )
    assert stated is not None
    names = ("engine.code_lines", "kernels.native_lines", "cluster.code_lines")
    figures = count_source()
    counted = [figures[f"size.{name}"].value for name in names]
    assert [int(number.replace(",", "")) for number in stated.groups()] == pytest.approx(counted, rel=0.1)
