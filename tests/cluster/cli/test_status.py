"""`quire status` as operators see it."""

from __future__ import annotations

import importlib

import pytest

from quire.cluster.client.wire.status import FleetInfo, NodeInfo, ReplicaInfo

# The package has the function under the name of the module.
status_command = importlib.import_module("quire.cluster.cli.status")

FLEET = FleetInfo(
    replicas=(
        ReplicaInfo(replica_id="replica-new", model="demo", ready=True, state="ready"),
        ReplicaInfo(replica_id="replica-old", model="demo", state="stopped", problem="was replaced " * 9),
    ),
    nodes=(NodeInfo("0123456789abcdef", "10.0.0.1", resources={"CPU": 2.0}),),
)


def test_stopped_replicas_are_left_out_unless_it_is_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status_command._print(FLEET, wide=False)
    shown = capsys.readouterr().out
    assert "replica-new" in shown
    assert "replica-old" not in shown
    assert "1 stopped replica; --wide shows them" in shown
    assert "state" in shown, "every column of the nodes has a name"
    status_command._print(FLEET, wide=True)
    assert "stopped: " + "was replaced " * 8 in capsys.readouterr().out
