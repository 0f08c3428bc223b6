"""The table of docs/errors.md is the table of proto/errors.py."""

from __future__ import annotations

import inspect
from pathlib import Path

from quire.proto.errors import ERRORS, QuireError

PAGE = Path(__file__).parents[4] / "docs" / "errors.md"


def row(kind: type[QuireError]) -> str:
    meaning = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    retriable = "yes" if kind.is_retriable else "no"
    columns = (
        f"`{kind.reason}`",
        kind.grpc_status,
        str(kind.http_status),
        retriable,
        f"`{kind.__name__}`",
        meaning,
    )
    return f"| {' | '.join(columns)} |"


def test_table_of_reasons_is_current() -> None:
    table = PAGE.read_text().split("\n\n")[2]
    rows = table.splitlines()[2:]
    assert rows == [row(kind) for kind in ERRORS.values()]
