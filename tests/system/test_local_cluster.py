"""A private Ray instance, and another after it."""

import pytest
import ray

from quire.cluster.local_cluster import LocalCluster


@pytest.mark.cluster
def test_a_cluster_can_follow_another_in_one_process():
    for _ in range(2):
        with LocalCluster(num_cpus=1) as cluster:
            assert ray.is_initialized()
            directory = cluster.directory
        assert not ray.is_initialized()
        assert not directory.exists()
