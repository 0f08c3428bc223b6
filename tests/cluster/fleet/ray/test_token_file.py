"""The mode of Ray's token file."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.fleet.ray.local_cluster import has_token_file, restrict_token_file


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o640, 0o600, 0o400])
def test_token_file_is_readable_for_its_owner_alone(token_file: Path, mode: int) -> None:
    token_file.write_text("secret")
    token_file.chmod(mode)
    restrict_token_file()
    assert token_file.stat().st_mode & 0o777 == (mode if mode in (0o600, 0o400) else 0o600)
    assert has_token_file()
    assert token_file.read_text() == "secret"


def test_missing_token_file_is_not_made(token_file: Path) -> None:
    restrict_token_file()
    assert not has_token_file()
