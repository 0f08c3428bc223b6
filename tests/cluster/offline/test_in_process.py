"""The in-process engine logs the time of each stage of its start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import load_in_process


def test_start_logs_the_time_of_each_stage(make_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(EngineOptions(str(make_model("llama")), device="cpu", num_kv_blocks=4), Machine.this())
    with caplog.at_level(logging.INFO, logger="quire.cluster.offline.in_process"):
        _, group = load_in_process(config)
    group.close()
    (line,) = [record.getMessage() for record in caplog.records if "loaded" in record.getMessage()]
    assert config.model.name in line
    assert [word for word in line.replace(":", " ").split() if word in ("weights", "profile", "allocate")] == [
        "weights", "profile", "allocate",
    ]  # fmt: skip
