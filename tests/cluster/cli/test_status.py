"""`quire status` as operators see it."""

from __future__ import annotations

import importlib

import pytest

from quire.cluster.client.wire.status import FleetInfo, NodeInfo, ReplicaInfo
from quire.proto.replica_status import KvCacheInfo

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


def test_role_and_transfers_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    kv = KvCacheInfo(
        num_blocks=10, num_kv_offers=3, num_kv_leases=1, num_kv_pulls=2, num_kv_pulled_tokens=64,
        num_kv_failures=(0, 1, 2), num_kv_recomputed_tokens=48, kv_pull_bytes_per_s=25e6,
    )  # fmt: skip
    replica = ReplicaInfo("replica-1", "demo", ready=True, role="decode", num_steps=1, kv=kv)
    status_command._print(FleetInfo((replica,)), wide=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "replica-1 demo decode ready" in shown
    assert "64 tokens, 0 bytes, 25 MB/s" in shown
    assert "3 in vain (1 stale, 2 corrupt), 48 tokens computed instead" in shown
