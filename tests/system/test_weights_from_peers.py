"""A new replica takes its weights from a running one, in Ray's processes."""

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
