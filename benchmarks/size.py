"""Count the source: `python -m benchmarks.size [--json FILE]`.

Lines of code are lines that hold a token other than a comment or a docstring. Generated code is left out.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

from benchmarks.common import Figure, make_parser, report

ROOT = Path(__file__).parents[1]
ENGINE = ("proto", "kernels", "worker", "scheduler")
FOLDERS = (*ENGINE, "cluster", "tests", "benchmarks")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    report(count_source(), arguments.json)


def count_source() -> dict[str, Figure]:
    texts = {folder: [path.read_text() for path in python_files(folder)] for folder in FOLDERS}
    code = {folder: sum(map(num_code_lines, own)) for folder, own in texts.items()}
    native = [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cpp", ".h")]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for folder in (*ENGINE, "cluster")
        for text in texts[folder]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    note = f"{len(functions)} functions, docstrings included"
    return {
        **{f"size.{folder}.code_lines": Figure(count, "lines") for folder, count in code.items()},
        "size.engine.code_lines": Figure(
            sum(code[folder] for folder in ENGINE), "lines", "of " + ", ".join(ENGINE)
        ),
        "size.kernels.native_lines": Figure(
            sum(len(path.read_text().splitlines()) for path in native), "lines", "C++"
        ),
        "size.function.median_lines": Figure(statistics.median(functions), "lines", note),
    }


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def num_code_lines(text: str) -> int:
    """Count the lines that hold code, docstrings not included."""
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


if __name__ == "__main__":
    main()
