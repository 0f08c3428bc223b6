"""Tokens and tenants of calls."""

from __future__ import annotations

import pytest

from quire.cluster.api.tokens import Token, bearer
from quire.cluster.gateway.authentication import Authenticator, Metadata
from quire.proto.errors import InvalidRequest, Unauthenticated

TOKENS = Token(b"golden", "gold"), Token(b"tinny", "tin"), Token(b"plain")


def metadata(authorization: str | bytes) -> Metadata:
    return (("authorization", authorization),)


def test_call_with_a_valid_token_is_accepted() -> None:
    authenticator = Authenticator((Token(b"secret"),))
    assert authenticator.token((bearer("secret"),)) == Token(b"secret")
    assert authenticator.token(metadata(b"Bearer secret")) == Token(b"secret")


def test_call_without_a_valid_token_is_rejected() -> None:
    authenticator = Authenticator((Token(b"secret"),))
    for missing in (None, ()):
        with pytest.raises(Unauthenticated):
            authenticator.token(missing)
    for wrong in ("", "secret", "Bearer ", "Bearer secre", "bearer secret", "Bearer sécret"):
        with pytest.raises(Unauthenticated):
            authenticator.token(metadata(wrong))


def test_server_without_tokens_accepts_every_call() -> None:
    assert Authenticator().token(None) is None
    assert Authenticator().tenant(None, "gold") == "gold"


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
    assert Authenticator(TOKENS).tenant((bearer(secret),), claimed) == tenant


@pytest.mark.parametrize(("secret", "claimed"), [("golden", "tin"), ("golden", "nobody"), ("plain", "gold")])
def test_call_cannot_claim_another_token_s_tenant(secret: str, claimed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Authenticator(TOKENS).tenant((bearer(secret),), claimed)
    assert caught.value.field == "tenant"
