"""Count the source: `python -m benchmarks.size [--functions] [--json FILE]`.

Lines of code are lines that hold a token other than a comment or a docstring. With --functions, the ten longest
functions and the ten with most branches are listed as well. Branches are if, elif, for, while, except, with, match
cases, conditional expressions, conditions of comprehensions, and boolean operators.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .common import Figure, make_parser, report

ROOT = Path(__file__).parents[1]
ENGINE = ("proto", "kernels", "worker", "scheduler")
FOLDERS = (*ENGINE, "cluster", "tests", "benchmarks")
NATIVE_SUFFIXES = (".cpp", ".h")
NUM_LISTED = 10

_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.AsyncWith,
    ast.match_case,
    ast.IfExp,
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method.

    Attributes:
        num_lines: from its def line to its end.
        num_branches: decision points, as the module's docstring counts them.
    """

    place: str
    num_lines: int
    num_branches: int


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--functions", action="store_true", help="list the longest and most branched functions"
    )
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for folder in FOLDERS:
        figures |= folder_figures(folder)
    engine = sum(figures[f"size.{folder}.code_lines"].value for folder in ENGINE)
    figures["size.engine.code_lines"] = Figure(engine, "lines", "Python of " + ", ".join(ENGINE))
    found = [function for folder in (*ENGINE, "cluster") for function in functions(folder)]
    figures["size.function.median_lines"] = Figure(
        statistics.median(function.num_lines for function in found),
        "lines",
        f"{len(found)} functions, docstrings included",
    )
    if arguments.functions:
        figures |= listed(found)
    report(figures, arguments.json)


def folder_figures(folder: str) -> dict[str, Figure]:
    """Count files, lines and lines of code of a folder; C++ apart. Generated code is left out."""
    paths = python_files(folder)
    figures = {
        f"size.{folder}.files": Figure(len(paths), "files"),
        f"size.{folder}.lines": Figure(sum(num_lines(path) for path in paths), "lines"),
        f"size.{folder}.code_lines": Figure(sum(num_code_lines(path) for path in paths), "lines"),
    }
    native = [path for path in (ROOT / folder).rglob("*") if path.suffix in NATIVE_SUFFIXES]
    if native:
        total = sum(num_lines(path) for path in native)
        figures[f"size.{folder}.native_lines"] = Figure(total, "lines", f"{len(native)} files of C++")
    return figures


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def num_code_lines(path: Path) -> int:
    """Count the lines that hold code, docstrings not included."""
    text = path.read_text()
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def functions(folder: str) -> Iterator[Function]:
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(ROOT)}:{node.name}"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Function(place, length, sum(map(num_branches, ast.walk(node))))


def num_branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return len(node.ifs)
    return int(isinstance(node, _BRANCHES))


def listed(found: list[Function]) -> dict[str, Figure]:
    """The longest functions and those with most branches, as figures in order."""
    longest = sorted(found, key=lambda function: -function.num_lines)[:NUM_LISTED]
    branched = sorted(found, key=lambda function: -function.num_branches)[:NUM_LISTED]
    figures = {
        f"size.longest.{rank}": Figure(function.num_lines, "lines", function.place)
        for rank, function in enumerate(longest, start=1)
    }
    return figures | {
        f"size.most_branches.{rank}": Figure(function.num_branches, "branches", function.place)
        for rank, function in enumerate(branched, start=1)
    }


if __name__ == "__main__":
    main()
