"""Listening addresses, and what they require of TLS and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.client.wire.tokens import USER_ONLY, Role, Token, TokenSet, new_token
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.gateway.access.security import Certificate, ListenAddress, Security
from quire.cluster.os_utils.watched_file import constant
from quire.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:50051", "::1", 50051), ("localhost:65535", "localhost", 65535)],
)
def test_listen_address_is_parsed(text: str, host: str, port: int) -> None:
    address = ListenAddress.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text
    assert address.is_loopback


@pytest.mark.parametrize(
    "text", ["", "host", ":50051", "::1:50051", "host:", "host:x", "host:-1", "host:70000", "h:٣"]
)
def test_invalid_listen_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="listening"):
        ListenAddress.parse(text)


def test_unknown_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        _ = ListenAddress.parse("no such host:1").is_loopback


@pytest.mark.parametrize(
    ("security", "missing"),
    [
        (Security(), "TLS and a token file"),
        (Security(tokens=constant(TokenSet([Token.of("secret")]))), "but TLS is missing"),
        (Security(certificate=constant(Certificate(b"chain", b"key"))), "but a token file is missing"),
    ],
)
def test_public_address_requires_tls_and_tokens(security: Security, missing: str) -> None:
    for text in ("0.0.0.0:1", "[::]:1", "192.0.2.1:1"):
        with pytest.raises(ConfigError, match=missing):
            security.check_listen(ListenAddress.parse(text), insecure=False)
    security.check_listen(ListenAddress.parse("0.0.0.0:1"), insecure=True)
    security.check_listen(ListenAddress.parse("127.0.0.1:1"), insecure=False)


def test_public_address_with_tls_and_tokens_or_client_certificates_is_allowed() -> None:
    plain, for_certified = Certificate(b"chain", b"key"), Certificate(b"chain", b"key", b"authority")
    tokens = constant(TokenSet([Token.of("secret")]))
    for security in (
        Security(certificate=constant(plain), tokens=tokens),
        Security(certificate=constant(for_certified)),
    ):
        security.check_listen(ListenAddress.parse("0.0.0.0:1"), insecure=False)


def test_certificate_requires_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given together"):
        Security.load(ServerOptions(tls_cert=tmp_path / "cert.pem"))
    with pytest.raises(ConfigError, match="need a TLS certificate"):
        Security.load(ServerOptions(tls_client_ca=tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match=r"TLS certificate .*cert.pem cannot be read"):
        Security.load(ServerOptions(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"))


def test_api_key_is_a_user_s_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("gold", frozenset({Role.OPERATOR}))
    file.write_text(token.line())
    alone = Security.load(ServerOptions(api_key="secret")).tokens()
    assert [token.roles for token in alone] == [USER_ONLY]
    both = Security.load(ServerOptions(api_key="secret", token_file=file)).tokens()
    for tokens in (alone, both):
        assert tokens.find(b"secret") is not None
    assert both.find(text.encode()) == token
    assert alone.find(text.encode()) is None


@pytest.mark.parametrize("key", ["", "two words", "s\u00e9cret", "line\n"])
def test_unusable_api_key_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^api_key is not usable as a token, must be printable ASCII text"):
        ServerOptions(api_key=key)
