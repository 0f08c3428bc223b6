"""Downloads of a hub model's files on the nodes of a replica's ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....proto.config import EngineConfig
from ...config.hub.snapshot import download_model
from ..ray.errors import await_all

# A terabyte at 70 MB/s.
_DOWNLOAD_TIMEOUT_S = 4 * 3600.0


def fetch_model(config: EngineConfig, node_ids: Iterable[str]) -> dict[str, EngineConfig]:
    """Download the model once on each node, with the tokens and into the cache of the node's environment.

    Args:
        config: of a model on the hub, pinned to a commit.

    Returns:
        node id |-> the configuration with the path of the files on that node.

    Raises:
        ModelLoadError: a download failed.
        ReplicaUnavailable: a node's process died, or did not finish in time; names the node.
    """
    nodes = list(dict.fromkeys(node_ids))
    calls = {
        f"node {node[:8]}": ray.remote(_fetch)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(config.model.hub_id, config.model.commit)
        for node in nodes
    }  # fmt: skip
    paths = await_all(calls, _DOWNLOAD_TIMEOUT_S, f"downloading {config.model.hub_id}")
    return {
        node: replace(config, model=replace(config.model, path=path))
        for node, path in zip(nodes, paths, strict=True)
    }


def _fetch(hub_id: str, commit: str) -> str:
    return str(download_model(hub_id, commit).path)
