"""Bearer tokens: the server's file of token hashes, a client's file, and the call metadata that carries a token.

A line of the server's file holds a token's id, the salted hash of the whole token, and its holder::

    id=3f9a2c71 sha256=<salt>:<hash> tenant=gold roles=user

Tokens are random, 256 bits: no one can guess a token from its hash, so that a slow password hash would protect
nothing more, and would let anyone load the server with wrong tokens. The id is part of the token, so that checking a
token takes one hash whatever the number of lines.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from ....proto.errors import ConfigError
from ...os_utils.watched_file import Source, constant

AUTHORIZATION = "authorization"
BEARER = "Bearer "

_PREFIX = "quire_"
_ID_BYTES, _SALT_BYTES, _SECRET_BYTES = 4, 16, 32
# The id of a token that `new_token` made.
_ID_OF = re.compile(rb"quire_([0-9a-f]{8})_")


class Role(StrEnum):
    """Kind of calls that a token permits."""

    USER = "user"  # generation
    OPERATOR = "operator"  # every call
    METRICS = "metrics"  # the metrics page


USER_ONLY = frozenset({Role.USER})


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token, of which only the salted hash is known.

    Attributes:
        token_id: part of the token; empty for one that `new_token` did not make.
        tenant: tenant of the calls that carry the token; None if such calls name their tenant themselves.
        roles: permitted calls; at least one.
    """

    token_id: str
    salt: bytes
    digest: bytes
    tenant: str | None = None
    roles: frozenset[Role] = USER_ONLY

    @staticmethod
    def of(secret: str | bytes, tenant: str | None = None, roles: frozenset[Role] = USER_ONLY) -> Token:
        """Return the token with a new salt."""
        raw = secret.encode() if isinstance(secret, str) else secret
        salt = secrets.token_bytes(_SALT_BYTES)
        return Token(_id_of(raw), salt, _digest(salt, raw), tenant, roles)

    def matches(self, secret: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)

    def line(self) -> str:
        """Return the token's line of the server's file."""
        holder = "" if self.tenant is None else f" tenant={self.tenant}"
        roles = ",".join(sorted(self.roles))
        return f"id={self.token_id} sha256={self.salt.hex()}:{self.digest.hex()}{holder} roles={roles}"


class TokenSet:
    """The valid tokens of a server.

    Raises:
        ConfigError: two tokens have one id.
    """

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._tokens = tuple(tokens)
        self._with_id: dict[str, Token] = {}
        for token in self._tokens:
            if token.token_id in self._with_id:
                raise ConfigError(f"two tokens have the id {token.token_id}")
            if token.token_id:
                self._with_id[token.token_id] = token
        self._without_id = tuple(token for token in self._tokens if not token.token_id)
        self.tenants = frozenset(token.tenant for token in self._tokens if token.tenant is not None)

    def find(self, secret: bytes) -> Token | None:
        """Return the token that a call presents; None if it is not valid."""
        with_id = self._with_id.get(_id_of(secret))
        candidates = self._without_id if with_id is None else (with_id, *self._without_id)
        # Compares all of them, so that the time taken does not depend on which one matches.
        matching = [token for token in candidates if token.matches(secret)]
        return matching[0] if matching else None

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)


NO_TOKENS: Source[TokenSet] = constant(TokenSet())


def new_token(tenant: str | None = None, roles: frozenset[Role] = USER_ONLY) -> tuple[str, Token]:
    """Return a random token, as text and as the server keeps it.

    Raises:
        ConfigError: the tenant's name cannot stand in a line of the file.
    """
    if tenant is not None and (not tenant.isprintable() or not tenant or " " in tenant):
        raise ConfigError(f"tenant is {tenant!r}, must be printable text without spaces")
    text = f"{_PREFIX}{secrets.token_hex(_ID_BYTES)}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return text, Token.of(text, tenant, roles)


def bearer(token: str) -> tuple[str, str]:
    """Return the metadata entry that carries a token."""
    return AUTHORIZATION, BEARER + token


def load_tokens(path: Path) -> TokenSet:
    """Read a server's token file. Skips empty lines and lines that begin with #.

    A line may also hold a token itself, as ``TOKEN`` or ``TENANT:TOKEN``; the tenant ``admin`` is then an operator.

    Raises:
        ConfigError: the file cannot be read, has no token, or has an invalid line.
    """
    tokens = []
    for where, line in _lines(path):
        try:
            tokens.append(_parse_hashed(line) if line.startswith(b"id=") else _parse_plain(line))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    try:
        return TokenSet(tokens)
    except ConfigError as error:
        raise ConfigError(f"token file {path}: {error}") from None


def load_client_token(path: Path) -> str:
    """Return the first token of a client's file, whose lines are ``TOKEN`` or ``TENANT:TOKEN``.

    Raises:
        ConfigError: the file cannot be read, has no token, or has hashes of tokens.
    """
    where, line = next(_lines(path))
    if line.startswith(b"id="):
        raise ConfigError(
            f"{where}: is the hash of a token; a client needs the token that quire token printed"
        )
    try:
        return _split_plain(line)[1].decode()
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the content of each line; at least one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from error
    numbered = enumerate((line.strip() for line in content.splitlines()), start=1)
    lines = [(f"token file {path}, line {number}", line) for number, line in numbered]
    lines = [(where, line) for where, line in lines if line and not line.startswith(b"#")]
    if not lines:
        raise ConfigError(f"token file {path} holds no token")
    yield from lines


def _parse_hashed(line: bytes) -> Token:
    """Raises ValueError with the problem."""
    entries = dict(_entry(word) for word in line.decode().split())
    if unknown := set(entries) - {"id", "sha256", "tenant", "roles"}:
        raise ValueError(f"{min(unknown)!r} is unknown, must be id, sha256, tenant or roles")
    if missing := {"id", "sha256", "roles"} - set(entries):
        raise ValueError(f"{min(missing)} is missing")
    salt, _, digest = entries["sha256"].partition(":")
    try:
        token = Token(
            entries["id"], bytes.fromhex(salt), bytes.fromhex(digest), entries.get("tenant"), _roles(entries)
        )
    except ValueError as error:
        raise ValueError(f"sha256 or roles is invalid: {error}") from None
    if not token.token_id or not token.salt or len(token.digest) != sha256().digest_size:
        raise ValueError("must have an id, and a sha256 of a salt and 64 hexadecimal digits")
    return token


def _entry(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"{word!r} is not NAME=VALUE")
    return name, value


def _roles(entries: dict[str, str]) -> frozenset[Role]:
    return frozenset(Role(name) for name in entries["roles"].split(","))


def _parse_plain(line: bytes) -> Token:
    """Raises ValueError with the problem."""
    tenant, secret = _split_plain(line)
    return Token.of(secret, tenant, frozenset({Role.OPERATOR}) if tenant == "admin" else USER_ONLY)


def _split_plain(line: bytes) -> tuple[str | None, bytes]:
    tenant, colon, secret = (part.strip() for part in line.partition(b":"))
    if not colon:
        return None, line
    if not tenant or not secret:
        raise ValueError("must be TOKEN or TENANT:TOKEN")
    try:
        return tenant.decode(), secret
    except UnicodeDecodeError:
        raise ValueError("the tenant's name is not UTF-8") from None


def _id_of(secret: bytes) -> str:
    found = _ID_OF.match(secret)
    return "" if found is None else found[1].decode()


def _digest(salt: bytes, secret: bytes) -> bytes:
    return sha256(salt + secret).digest()
