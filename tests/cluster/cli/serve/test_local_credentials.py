"""A local fleet has a certificate and tokens that are made once, and that only their user may read."""

from pathlib import Path

import pytest
from certificates import HAS_OPENSSL

from quire.cluster.cli.serve import local_credentials
from quire.cluster.cli.serve.local_credentials import LocalCredentials
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.gateway.access.security import Security
from quire.proto.errors import ConfigError

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="openssl is not installed")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_credentials_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    LocalCredentials.make(folder)
    made = contents(folder)
    assert set(made) == {
        "tls.crt", "tls.key", "tokens", "user.token", "operator.token", "metrics.token"
    }  # fmt: skip
    LocalCredentials.make(folder)
    assert contents(folder) == made
    assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}


def test_certificate_that_ends_within_a_day_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_credentials, "_SECONDS_LEFT", 366 * 86_400)
    LocalCredentials.make(tmp_path)
    made = contents(tmp_path)
    LocalCredentials.make(tmp_path)
    changed = {name for name, content in contents(tmp_path).items() if content != made[name]}
    assert changed == {"tls.crt", "tls.key"}


def test_server_takes_the_options(tmp_path: Path) -> None:
    credentials = LocalCredentials.make(tmp_path)
    options = {name: Path(value) for name, value in credentials.server_options().items()}
    Security.load(ServerOptions(**options))  # type: ignore[arg-type]  # those that are files
    files = [
        f"--tls-ca {tmp_path}/tls.crt --token-file {tmp_path}/{role}.token" for role in ("operator", "user")
    ]
    assert credentials.example_commands("localhost:1") == [
        f"quire status --target localhost:1 {files[0]}",
        f'quire generate "Hello" --target localhost:1 {files[1]}',
    ]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: cannot be written"):
        LocalCredentials.make(tmp_path / "file")
