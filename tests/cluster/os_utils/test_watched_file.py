"""Files that are read again after they have changed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from quire.cluster.os_utils.watched_file import INTERVAL_S, WatchedFiles
from quire.proto.errors import ConfigError


class Watched:
    """Two watched files with a clock of the test's own; content that contains ``bad`` cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.now, self.num_reads = 0.0, 0
        self.paths = folder / "left", folder / "right"
        for path in self.paths:
            path.write_text("1")
        self.files = WatchedFiles(self.paths, self.read, "the pair", clock=lambda: self.now)

    def read(self) -> str:
        self.num_reads += 1
        try:
            content = "".join(path.read_text() for path in self.paths)
        except OSError as error:
            raise ConfigError(str(error)) from error
        if "bad" in content:
            raise ConfigError("it is bad")
        return content

    def content_later(self) -> str:
        self.now += INTERVAL_S
        return self.files()


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.files() == "11"
    watched.paths[0].write_text("22")
    assert watched.files() == "11"  # looked at a moment ago
    assert watched.content_later() == "221"
    (tmp_path / "new").write_text("33")
    os.replace(tmp_path / "new", watched.paths[1])
    assert watched.content_later() == "2233"


def test_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for _ in range(3):
        watched.content_later()
    assert watched.num_reads == 1


def test_bad_file_keeps_the_last_content_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path)
    with caplog.at_level(logging.INFO, "quire"):
        watched.paths[0].write_text("bad")
        assert [watched.content_later() for _ in range(3)] == 3 * ["11"]
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "the pair changed but cannot be used, so the last valid one stays: it is bad" in caplog.text
        watched.paths[0].unlink()
        assert [watched.content_later() for _ in range(3)] == 3 * ["11"]
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
        watched.paths[0].write_text("3")
        assert watched.content_later() == "31"
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]


def test_first_content_must_be_valid(tmp_path: Path) -> None:
    def read() -> str:
        raise ConfigError("none")

    with pytest.raises(ConfigError, match="none"):
        WatchedFiles([tmp_path / "missing"], read, "nothing")
