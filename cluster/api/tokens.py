"""Bearer tokens: the token file, and the call metadata that carries a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...proto.errors import ConfigError

AUTHORIZATION = "authorization"
BEARER = "Bearer "


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token.

    Attributes:
        tenant: tenant of the calls that carry the token; None if the token names no tenant.
    """

    secret: bytes
    tenant: str | None = None


def bearer(token: str) -> tuple[str, str]:
    """Return the metadata entry that carries a token."""
    return AUTHORIZATION, BEARER + token


def load_tokens(path: Path) -> tuple[Token, ...]:
    """Read a token file: one ``TOKEN`` or ``TENANT:TOKEN`` per line. Skips empty lines and lines that begin with #.

    Raises:
        ConfigError: the file cannot be read, has no token, or has an invalid line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from error
    lines = enumerate((line.strip() for line in content.splitlines()), start=1)
    tokens = tuple(
        _parse_token(line, f"token file {path}, line {number}")
        for number, line in lines
        if line and not line.startswith(b"#")
    )
    if not tokens:
        raise ConfigError(f"token file {path} holds no token")
    return tokens


def _parse_token(line: bytes, where: str) -> Token:
    tenant, colon, secret = (part.strip() for part in line.partition(b":"))
    if not colon:
        return Token(line)
    if not tenant or not secret:
        raise ConfigError(f"{where}: must be TOKEN or TENANT:TOKEN")
    try:
        return Token(secret, tenant.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: the tenant's name is not UTF-8") from None
