"""`quire engine` against a server: pause, sleep and other weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_server import threaded_server

from quire import Client, ReplicaInfo
from quire.cluster import cli
from quire.cluster.cli.exit_status import WRONG_USE


def test_commands_change_the_state_of_the_engine(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model("llama")
    with threaded_server(model) as server, Client(server.server.target) as client:

        def run(*arguments: str) -> tuple[int, str]:
            argv = ["quire", "engine", *arguments, "--target", server.server.target]
            monkeypatch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            captured = capsys.readouterr()
            return int(ended.value.code or 0), (captured.out or captured.err).strip()

        def state() -> ReplicaInfo:
            server.await_status()
            return client.status()[0]

        assert run("pause", "--mode", "wait") == (0, "paused")
        assert state().paused
        assert run("resume") == (0, "resumed")
        assert not state().paused
        assert run("sleep", "--level", "2") == (0, "asleep")
        assert state().sleep_level == 2
        status, problem = run("wake-up")
        assert status == WRONG_USE
        assert "update_weights must name others first" in problem
        assert run("update-weights", str(model), "--version", "step-1") == (0, "weights step-1")
        assert run("wake-up", "--tags", "kv_cache") == (0, "awake: kv_cache")
        assert state().sleep_level == 2
        assert run("wake-up") == (0, "awake")
        assert state().weights_version == "step-1"
        assert run("sleep", "--mode", "never")[0] == WRONG_USE
