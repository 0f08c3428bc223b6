"""Progress of downloads without a terminal: a line in the log now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import hub_of_this_process

from quire.cluster.config import hub
from quire.cluster.config.hub import download_bar, download_model

MODEL = "org/tiny"


def test_bytes_are_logged_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr("quire.cluster.config.hub.time.monotonic", lambda: clock[0])
    name = "huggingface_hub.snapshot_download"
    written, arrived = (
        download_bar(MODEL)(name=own, unit="B", total=0, disable=None) for own in (name, f"{name}.transfer")
    )
    files = download_bar(MODEL)(total=3)
    written.total += 8e9  # as huggingface_hub does for each file
    with caplog.at_level(logging.INFO, logger=hub.__name__):
        for clock[0] in (105.0, 109.9, 110.0, 115.0):
            for bar in (arrived, written):
                bar.update(1_000_000_000)
            files.update()
    assert [record.getMessage() for record in caplog.records] == ["org/tiny: 3.00 of 8.00 GB"]


def test_downloads_log_their_progress(
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub, "LOG_INTERVAL_S", 0.0)
    with (
        hub_of_this_process({MODEL: make_model("llama")}, tmp_path / "cache"),
        caplog.at_level(logging.INFO, logger=hub.__name__),
    ):
        download_model(MODEL)
    assert any(" of 0.00 GB" in record.getMessage() for record in caplog.records)
