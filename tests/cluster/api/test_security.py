"""Who may listen where, and who may call."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.api.security import ListenAddress, Security, Token, bearer, load_tokens
from quire.proto.errors import ConfigError, InvalidRequest, Unauthenticated

GUARDED = Security(certificate=(b"chain", b"key"), tokens=(Token(b"secret"),))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:50051", "::1", 50051), ("localhost:65535", "localhost", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = ListenAddress.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text
    assert address.is_loopback


@pytest.mark.parametrize(
    "text", ["", "host", ":50051", "::1:50051", "host:", "host:x", "host:-1", "host:70000", "h:٣"]
)
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="listening"):
        ListenAddress.parse(text)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        _ = ListenAddress.parse("no such host:1").is_loopback


@pytest.mark.parametrize(
    ("security", "lacking"),
    [
        (Security(), "TLS and a token file"),
        (Security(tokens=(Token(b"secret"),)), "but TLS is missing"),
        (Security(certificate=(b"chain", b"key")), "but a token file is missing"),
    ],
)
def test_others_may_not_connect_in_the_clear(security: Security, lacking: str) -> None:
    for text in ("0.0.0.0:1", "[::]:1", "192.0.2.1:1"):
        with pytest.raises(ConfigError, match=lacking):
            security.check_listen(ListenAddress.parse(text), insecure=False)
    security.check_listen(ListenAddress.parse("0.0.0.0:1"), insecure=True)
    security.check_listen(ListenAddress.parse("127.0.0.1:1"), insecure=False)


def test_others_may_connect_with_tls_and_a_token() -> None:
    GUARDED.check_listen(ListenAddress.parse("0.0.0.0:1"), insecure=False)


def test_calls_carry_a_token() -> None:
    GUARDED.check_call(bearer("secret")[1])
    GUARDED.check_call(b"Bearer secret")
    Security().check_call(None)
    for wrong in (None, "", "secret", "Bearer ", "Bearer secre", "bearer secret", "Bearer sécret"):
        with pytest.raises(Unauthenticated):
            GUARDED.check_call(wrong)


@pytest.mark.parametrize(
    ("secret", "claimed", "tenant"),
    [
        ("golden", "", "gold"),
        ("golden", "gold", "gold"),
        ("golden", "tin", None),
        ("golden", "nobody", None),
        ("plain", "", ""),
        ("plain", "nobody", "nobody"),
        ("plain", "gold", None),
    ],
)
def test_nobody_claims_the_tenant_of_another_s_token(secret: str, claimed: str, tenant: str | None) -> None:
    security = Security(tokens=(Token(b"golden", "gold"), Token(b"tinny", "tin"), Token(b"plain")))
    authorization = bearer(secret)[1]
    if tenant is not None:
        assert security.tenant(authorization, claimed) == tenant
        return
    with pytest.raises(InvalidRequest) as caught:
        security.tenant(authorization, claimed)
    assert caught.value.field == "tenant"


def test_without_tokens_a_caller_says_whose_call_it_is() -> None:
    assert Security().tenant(None, "gold") == "gold"


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\none\n\n  two  \ngold:three\n gold : four:5 \n")
    assert load_tokens(file) == (
        Token(b"one"),
        Token(b"two"),
        Token(b"three", "gold"),
        Token(b"four:5", "gold"),
    )
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no token"):
        load_tokens(file)
    for half in (":one", "gold:", ":"):
        file.write_text(f"one\n{half}\n")
        with pytest.raises(ConfigError, match="line 2: must be TOKEN or TENANT:TOKEN"):
            load_tokens(file)
    file.write_bytes(b"\xff:one\n")
    with pytest.raises(ConfigError, match="line 1: the tenant's name is not UTF-8"):
        load_tokens(file)
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file"):
        load_tokens(tmp_path / "missing")


def test_a_certificate_comes_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given together"):
        Security.load(tls_cert=tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match=r"TLS certificate .*cert.pem cannot be read"):
        Security.load(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
