"""Callers, their roles and tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.client.wire.tokens import Role, Token, TokenSet, load_tokens, new_token
from quire.cluster.gateway.access.authentication import ANYONE, Authenticator, Caller, authorization_of
from quire.cluster.os_utils.watched_file import INTERVAL_S, WatchedFiles, constant
from quire.proto.errors import InvalidRequest, PermissionDenied, Unauthenticated

TOKENS = TokenSet([Token.of("golden", "gold"), Token.of("tinny", "tin"), Token.of("plain")])
AUTHENTICATOR = Authenticator(constant(TOKENS))
USER = frozenset({Role.USER})


def test_token_names_the_caller() -> None:
    operator = Token.of("secret", "ops", frozenset({Role.OPERATOR, Role.USER}))
    authenticator = Authenticator(constant(TokenSet([*TOKENS, operator])))
    assert authenticator.caller("Bearer golden") == Caller("gold", USER)
    assert authenticator.caller("bearer  plain ") == Caller(None, USER)
    assert authenticator.caller("Bearer secret") == Caller("ops", operator.roles)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "golden",
        "Bearer",
        "Bearer ",
        "Bearer golde",
        "Bearer goldené",
        "Basic golden",
        "Bearer \ud800",
    ],
)
def test_call_without_a_valid_token_is_rejected(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated):
        AUTHENTICATOR.caller(authorization)


def test_authorization_is_read_from_metadata() -> None:
    assert authorization_of((("authorization", b"Bearer golden"),)) == "Bearer golden"
    assert authorization_of((("other", "x"), ("authorization", "Bearer golden"))) == "Bearer golden"
    assert authorization_of(None) is authorization_of(()) is None


def test_server_without_tokens_accepts_every_call() -> None:
    authenticator = Authenticator()
    assert authenticator.caller(None) is ANYONE
    assert authenticator.tenant(ANYONE, "gold") == "gold"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("required", Role)
def test_caller_may_do_what_its_role_permits(role: Role, required: Role) -> None:
    caller = Caller(None, frozenset({role}))
    if role in (required, Role.OPERATOR):
        caller.require(required)
        return
    with pytest.raises(
        PermissionDenied, match=f"needs a token with the role {required}; this token has {role}"
    ):
        caller.require(required)


@pytest.mark.parametrize(
    ("secret", "claimed", "tenant"),
    [
        ("golden", "", "gold"),
        ("golden", "gold", "gold"),
        ("plain", "", ""),
        ("plain", "nobody", "nobody"),
    ],
)
def test_tenant_is_the_token_s_or_else_the_claimed_one(secret: str, claimed: str, tenant: str) -> None:
    assert AUTHENTICATOR.tenant(AUTHENTICATOR.caller(f"Bearer {secret}"), claimed) == tenant


@pytest.mark.parametrize(("secret", "claimed"), [("golden", "tin"), ("golden", "nobody"), ("plain", "gold")])
def test_call_cannot_claim_another_token_s_tenant(secret: str, claimed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AUTHENTICATOR.tenant(AUTHENTICATOR.caller(f"Bearer {secret}"), claimed)
    assert caught.value.field == "tenant"


def test_token_added_to_or_removed_from_the_file_is_seen_without_a_restart(tmp_path: Path) -> None:
    file, now = tmp_path / "tokens", 0.0
    (first, first_token), (second, second_token) = new_token("gold"), new_token("tin")
    file.write_text(first_token.line())
    watched = WatchedFiles([file], lambda: load_tokens(file), "token file", clock=lambda: now)
    authenticator = Authenticator(watched)
    assert authenticator.caller(f"Bearer {first}").tenant == "gold"
    with pytest.raises(Unauthenticated):
        authenticator.caller(f"Bearer {second}")
    file.write_text(second_token.line())
    now += INTERVAL_S
    assert authenticator.caller(f"Bearer {second}").tenant == "tin"
    with pytest.raises(Unauthenticated):
        authenticator.caller(f"Bearer {first}")
