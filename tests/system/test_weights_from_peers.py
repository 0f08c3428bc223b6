"""A new replica takes its weights from a running one, in Ray's processes."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import ray

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.cluster.fleet.replica.launch import launch_replica
from quire.cluster.fleet.replica.rank_lookup import find_rank


@pytest.mark.cluster
def test_new_replica_maps_the_weights_of_a_running_one() -> None:
    config = resolve(EngineOptions("demo", device="cpu", weights_from_peers=True), Machine.this())
    with (
        LocalCluster(num_cpus=4) as cluster,
        launch_replica(config, "one", cluster),
        launch_replica(config, "two", cluster, peers=["gone", "one"]),
    ):
        ranks = [find_rank(replica_id, 0, cluster.namespace) for replica_id in ("one", "two")]
        first, second = ray.get([rank.weight_segments.remote() for rank in ranks], timeout=120.0)
    assert [each.name for each in first] == [each.name for each in second] != []


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_new_replica_has_its_weights_if_its_peer_hangs_or_dies(
    kind: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = EngineOptions("demo", device="cpu", tensor_parallel_size=2, weights_from_peers=True)
    config = resolve(options, Machine.this())
    with LocalCluster(num_cpus=8) as cluster, launch_replica(config, "one", cluster) as one:
        hung = one.record.pids[1:]
        for pid in hung:
            os.kill(pid, kind)
        try:
            with launch_replica(config, "two", cluster, peers=["one"]):
                rank = find_rank("two", 0, cluster.namespace)
                assert ray.get(rank.weight_segments.remote(), timeout=120.0)
        finally:
            for pid in hung if kind is signal.SIGSTOP else ():
                os.kill(pid, signal.SIGCONT)
    # A killed rank may have been replaced before it is asked.
    if kind is signal.SIGSTOP or "mapped" not in caplog.text:
        assert "of one has not named its weights" in caplog.text or "of one does not name" in caplog.text
        assert "mapped" not in caplog.text
