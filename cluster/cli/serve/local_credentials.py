"""The certificate and the tokens of a fleet on one machine, made once and kept in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ....proto.errors import ConfigError
from ...client.wire.tokens import Role, new_token

_VALID_DAYS = 365
_SECONDS_LEFT = 86_400
_OPENSSL_TIMEOUT_S = 60.0
_TENANT = "local"


@dataclass(frozen=True, slots=True)
class LocalCredentials:
    """Files in a folder that only this user may enter; those that exist and are valid are used again.

    The certificate is its own authority, for localhost and 127.0.0.1. `user.token` may generate, `operator.token`
    may also see and change the fleet; the server reads their hashes from `tokens`.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> LocalCredentials:
        """Make the files that the folder lacks.

        Raises:
            ConfigError: the folder cannot be written, or there is no openssl.
        """
        credentials = cls(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not credentials._has_certificate():
                credentials._make_certificate()
            if not all(path.exists() for path in (credentials.tokens, *map(credentials.token_of, Role))):
                credentials._make_tokens()
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
        return credentials

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    def token_of(self, role: Role) -> Path:
        return self.folder / f"{role.value}.token"

    def server_options(self) -> dict[str, str]:
        """Return the options of a server that uses the files."""
        return {"tls_cert": str(self.certificate), "tls_key": str(self.key), "token_file": str(self.tokens)}

    def example_commands(self, address: str) -> list[str]:
        """Return commands that call the server at an address, one per role."""
        return [
            f"quire {command} --target {address} --tls-ca {self.certificate} --token-file {self.token_of(role)}"
            for command, role in (("status", Role.OPERATOR), ('generate "Hello"', Role.USER))
        ]

    def _has_certificate(self) -> bool:
        """Return whether there is a certificate that is valid for another day."""
        if not (self.certificate.exists() and self.key.exists()):
            return False
        return (
            _openssl("x509", "-in", str(self.certificate), "-noout", "-checkend", f"{_SECONDS_LEFT}") is None
        )

    def _make_certificate(self) -> None:
        key = (
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            str(self.key),
        )
        names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        out = ("-days", f"{_VALID_DAYS}", "-out", str(self.certificate))
        problem = _openssl("req", "-x509", *key, *names, *out)
        if problem is not None:
            raise ConfigError(f"{self.certificate}: openssl cannot make the certificate: {problem}")

    def _make_tokens(self) -> None:
        lines = []
        for role in Role:
            text, made = new_token(_TENANT, frozenset({role}))
            lines.append(made.line())
            _write(self.token_of(role), text)
        _write(self.tokens, "\n".join(lines))


def _openssl(*arguments: str) -> str | None:
    """Run openssl; return the last line of its error output if it fails, None if it succeeds."""
    if shutil.which("openssl") is None:
        raise ConfigError(
            "openssl is not installed, must be: it makes the certificate of a fleet on this machine"
        )
    try:
        done = subprocess.run(
            ["openssl", *arguments], capture_output=True, text=True, timeout=_OPENSSL_TIMEOUT_S, umask=0o077
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_OPENSSL_TIMEOUT_S:g} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _write(path: Path, line: str) -> None:
    """Write a file that only this user may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(line + "\n")
