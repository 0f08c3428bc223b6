"""Line and branch counts of the source."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks import size

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


def test_code_lines_leave_out_docstrings_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert size.num_code_lines(path) == 7


def test_branches_count_conditions_and_boolean_operators() -> None:
    (function,) = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)]
    assert sum(map(size.num_branches, ast.walk(function))) == 3


def test_every_package_is_counted() -> None:
    figures = size.folder_figures("kernels")
    assert figures["size.kernels.native_lines"].value > 0
    assert figures["size.kernels.code_lines"].value < figures["size.kernels.lines"].value
