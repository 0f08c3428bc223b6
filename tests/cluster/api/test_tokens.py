"""Token files."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.api.tokens import Token, load_tokens
from quire.proto.errors import ConfigError


def test_token_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\none\n\n  two  \ngold:three\n gold : four:5 \n")
    assert load_tokens(file) == (
        Token(b"one"),
        Token(b"two"),
        Token(b"three", "gold"),
        Token(b"four:5", "gold"),
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"# none\n", "holds no token"),
        (b"one\n:one\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"one\ngold:\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"one\n:\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"\xff:one\n", "line 1: the tenant's name is not UTF-8"),
    ],
)
def test_invalid_token_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_tokens(file)


def test_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file"):
        load_tokens(tmp_path / "missing")
