"""Tokens and token files."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.client.wire.tokens import (
    USER_ONLY,
    Role,
    Token,
    TokenSet,
    load_client_token,
    load_tokens,
    new_token,
)
from quire.proto.errors import ConfigError

HASH = "sha256=00ff:" + 64 * "a"


def test_new_token_is_found_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    roles = frozenset({Role.OPERATOR, Role.METRICS})
    made = [new_token(), new_token("gold"), new_token("tin", roles)]
    file.write_text("# ours\n\n" + "\n".join(token.line() for _, token in made))
    loaded = load_tokens(file)
    assert list(loaded) == [token for _, token in made]
    assert [loaded.find(text.encode()) for text, _ in made] == [token for _, token in made]
    assert loaded.tenants == {"gold", "tin"}
    assert [token.roles for token in loaded] == [USER_ONLY, USER_ONLY, roles]


def test_file_and_memory_hold_no_token() -> None:
    text, token = new_token("gold")
    secret = text.split("_", 2)[2]  # which may contain "_" itself
    assert secret not in token.line()
    assert secret not in repr(token)
    assert new_token()[0] != text


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + "x", str.upper, str.lower])
def test_changed_token_is_not_found(change: object) -> None:
    text, token = new_token()
    assert callable(change)
    assert TokenSet([token]).find(change(text).encode()) is None
    assert TokenSet([token]).find(text.encode()) is token


def test_checking_a_token_takes_one_hash_whatever_the_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [new_token() for _ in range(100)]
    tokens, compared, matches = TokenSet(token for _, token in made), list[Token](), Token.matches

    def hash_and_note(token: Token, secret: bytes) -> bool:
        compared.append(token)
        return matches(token, secret)

    monkeypatch.setattr(Token, "matches", hash_and_note)
    assert tokens.find(made[42][0].encode()) is made[42][1]
    assert compared == [made[42][1]]
    assert tokens.find(new_token()[0].encode()) is None


def test_plain_lines_are_hashed_when_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\none\n\n  two  \ngold:three\n gold : four:5 \nadmin:five")
    loaded = load_tokens(file)
    found = {secret: loaded.find(secret.encode()) for secret in ("one", "two", "three", "four:5", "five")}
    assert [token and token.tenant for token in found.values()] == [None, None, "gold", "gold", "admin"]
    assert [token and token.roles for token in found.values()] == 4 * [USER_ONLY] + [{Role.OPERATOR}]
    assert loaded.find(b"gold:three") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"# none\n", "holds no token"),
        (b"one\n:one\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"one\ngold:\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"one\n:\n", "line 2: must be TOKEN or TENANT:TOKEN"),
        (b"\xff:one\n", "line 1: the tenant's name is not UTF-8"),
        (b"id=1 roles=user", "line 1: sha256 is missing"),
        (f"id=1 {HASH}".encode(), "roles is missing"),
        (f"id=1 {HASH} roles=king".encode(), "'king' is not a valid Role"),
        (f"id=1 {HASH} roles=".encode(), "'' is not a valid Role"),
        (f"id= {HASH} roles=user".encode(), "must have an id"),
        (b"id=1 sha256=00:aa roles=user", "64 hexadecimal digits"),
        (f"id=1 {HASH.replace('00ff', '')} roles=user".encode(), "a salt"),
        (b"id=1 sha256=zz:aa roles=user", "sha256 or roles is invalid"),
        (f"id=1 {HASH} roles=user color=red".encode(), "'color' is unknown"),
        (f"id=1 {HASH} roles=user gold".encode(), "'gold' is not NAME=VALUE"),
        (b"id=\xff", "line 1: "),
        (f"id=1 {HASH} roles=user\nid=1 {HASH} roles=user".encode(), "two tokens have the id 1"),
    ],
)
def test_invalid_token_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"token file .*{problem}"):
        load_tokens(file)


def test_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file"):
        load_tokens(tmp_path / "missing")


@pytest.mark.parametrize("tenant", ["", "two words", "line\nbreak", "tab\t"])
def test_tenant_that_no_line_can_hold_is_refused(tenant: str) -> None:
    with pytest.raises(ConfigError, match="must be printable text without spaces"):
        new_token(tenant)


def test_client_token_is_the_first_line_s(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for content, token in (("# mine\none\ntwo", "one"), ("gold:three", "three")):
        file.write_text(content)
        assert load_client_token(file) == token
    file.write_text(Token.of("one").line().replace("id=", "id=1"))
    with pytest.raises(ConfigError, match="is the hash of a token"):
        load_client_token(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"line 1: .*decode"):
        load_client_token(file)
