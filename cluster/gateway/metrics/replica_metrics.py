"""Samples of replicas, from the latest status of each."""

from __future__ import annotations

import socket

from ....proto.config import EngineConfig
from ....proto.replica_status import RankStatus, ReplicaStatus
from ...fleet.replica.client import ReplicaClient
from ...os_utils.processes import process_usage
from . import of_replicas, of_requests
from .samples import Samples
from .views import ModelsView


def collect_replicas(samples: Samples, models: ModelsView) -> None:
    """Add the samples of every replica of this gateway; a replica without a status has only those of its state."""
    for model in models:
        samples.add(of_requests.UNPLACED_REQUESTS, (model.name,), model.pool.num_waiting)
        for replica_id, client in model.pool.clients.items():
            labels = (model.name, replica_id)
            samples.add(of_replicas.REPLICA_READY, labels, not model.pool.why_unavailable(replica_id))
            samples.add(of_replicas.REPLICA_SILENCE, labels, client.silence_s)
            _collect_status(samples, labels, client)
            if client.latest_status is not None:
                _collect_cache_config(samples, labels, model.config, client.latest_status)
                _collect_drafts(samples, labels, model.config, client.latest_status)


def _collect_status(samples: Samples, labels: tuple[str, str], client: ReplicaClient) -> None:
    status = client.latest_status
    if status is None:
        return
    for metric, value_of in of_replicas.OF_STATUS.items():
        samples.add(metric, labels, value_of(status))
    samples.add_counts(of_replicas.KV_BLOCKS, labels, block_counts(status))
    if status.num_host_blocks:
        samples.add_counts(of_replicas.HOST_BLOCKS, labels, _host_block_counts(status))
    for rank in status.ranks:
        _collect_rank(samples, labels, rank)


def _collect_drafts(
    samples: Samples, labels: tuple[str, str], config: EngineConfig, status: ReplicaStatus
) -> None:
    if config.drafts_forced_text:
        samples.add(of_replicas.FORCED_TOKENS, labels, sum(status.num_accepted_tokens))
    if config.speculative is None:
        return
    for metric, value_of in of_replicas.OF_DRAFTS.items():
        samples.add(metric, labels, value_of(status))
    accepted = {str(place): count for place, count in enumerate(status.num_accepted_tokens)}
    samples.add_counts(of_replicas.SPEC_ACCEPTED_PER_POSITION, labels, accepted)


def block_counts(status: ReplicaStatus) -> dict[str, int]:
    """Return state |-> KV blocks; the states add up to all blocks."""
    counts = {
        "active": status.num_used_blocks,
        "fenced": status.num_fenced_blocks,
        "cached": status.num_cached_blocks,
    }
    return counts | {"empty": status.num_blocks - sum(counts.values())}


def _host_block_counts(status: ReplicaStatus) -> dict[str, int]:
    active, cached = status.num_used_host_blocks, status.num_cached_host_blocks
    return {"active": active, "cached": cached, "empty": status.num_host_blocks - active - cached}


def _collect_rank(samples: Samples, labels: tuple[str, str], rank: RankStatus) -> None:
    number = str(rank.rank)
    samples.add(of_replicas.RANK_INFO, (*labels, number, rank.node, rank.device), 1)
    usage = process_usage(rank.pid) if rank.node == socket.gethostname() else None
    if usage is not None:
        samples.add(of_replicas.RANK_MEMORY, (*labels, number), usage.resident_bytes)
        samples.add(of_replicas.RANK_CPU, (*labels, number), usage.cpu_s)


def _collect_cache_config(
    samples: Samples, labels: tuple[str, str], config: EngineConfig, status: ReplicaStatus
) -> None:
    sizes = str(status.block_size), str(status.num_blocks), str(status.num_host_blocks)
    prefix_caching = str(config.cache.prefix_caching)
    samples.add(of_replicas.CACHE_CONFIG, (*labels, *sizes, config.cache.kv_cache_dtype, prefix_caching), 1)
