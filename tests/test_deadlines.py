"""Tests do not fail because a machine is slow: calls of httpx have deadlines of the tests' own, not its 5 s."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
CALLS = {"Client", "AsyncClient", "get", "post", "put", "delete", "request", "stream"}


def calls_of_httpx() -> Iterator[tuple[str, ast.Call]]:
    """Yield the place of each call of the module, and the call."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="httpx"), attr=name)) if name in CALLS:
                    yield f"{path.relative_to(TESTS)}:{node.lineno}", node


def test_calls_of_httpx_have_a_deadline() -> None:
    found = list(calls_of_httpx())
    assert len(found) > 20
    assert [
        place for place, call in found if all(keyword.arg != "timeout" for keyword in call.keywords)
    ] == []
