"""Exposition: the metrics of a gateway in Prometheus' text format or in OpenMetrics."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from ....proto import admin_pb2
from ....proto.config import EngineConfig
from ....proto.kv_transfer import KvFailure
from ....proto.replica_status import RankStatus, ReplicaStatus
from ...client.wire.message_fields import from_message
from ...client.wire.status import FleetInfo
from ...fleet.replica.client import ReplicaClient
from ...os_utils.processes import process_usage
from . import fleet_definitions, replica_definitions, request_definitions
from .request_metrics import RequestMetrics
from .values import Samples
from .views import FleetView, ModelsView

OPENMETRICS = "application/openmetrics-text"

# Beginning of a reason of the autoscaler, without its numbers |-> label.
REASONS = {
    "no request for": "idle",
    "idle for less than": "keep_alive",
    "prompt tokens arrive": "arrivals",
    "prompt tokens wait": "backlog",
    "KV memory of": "kv_memory",
    "rows of": "rows",
    "a request has waited": "wait",
    "held for": "held",
    "min_replicas is": "min_replicas",
    "max_replicas is": "max_replicas",
}
OTHER = "other"


class Exposition(Collector):
    """The metrics of one gateway. Scrapes read the values in the gateway's event loop.

    Args:
        fleet: None if the gateway has one replica of its own.
    """

    def __init__(self, models: ModelsView, requests: RequestMetrics, fleet: FleetView | None = None) -> None:
        self._models = models
        self._requests = requests
        self._fleet = fleet
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Family]:
        samples = Samples()
        for model in self._models:
            self._requests.add_model(model.name)
        self._requests.collect(samples)
        collect_replicas(samples, self._models)
        if self._fleet is not None:
            collect_fleet(samples, self._fleet.describe())
        return samples.families()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return a scrape's body and its content type: OpenMetrics if the Accept header names it, else text."""
        if OPENMETRICS in accept:
            # With other escapings, prometheus_client 0.26 writes vllm_ for vllm: in the samples of OpenMetrics.
            encode: Callable[..., bytes] = generate_openmetrics
            body = encode(self._registry, escaping=ALLOWUTF8)
            return body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


def collect_replicas(samples: Samples, models: ModelsView) -> None:
    """Add the samples of every replica of this gateway; a replica without a status has only those of its state."""
    for model in models:
        samples.add(request_definitions.UNPLACED_REQUESTS, (model.name,), model.pool.num_waiting)
        samples.add(request_definitions.WARMED_TOKENS, (model.name,), model.pool.num_warmed_tokens)
        for replica_id, client in model.pool.clients.items():
            labels = (model.name, replica_id)
            samples.add(replica_definitions.REPLICA_READY, labels, not model.pool.why_unavailable(replica_id))
            samples.add(replica_definitions.REPLICA_SILENCE, labels, client.silence_s)
            _collect_status(samples, labels, client)
            if client.latest_status is not None:
                _collect_cache_config(samples, labels, model.config, client.latest_status)
                _collect_drafts(samples, labels, model.config, client.latest_status)


def _collect_status(samples: Samples, labels: tuple[str, str], client: ReplicaClient) -> None:
    status = client.latest_status
    if status is None:
        return
    for metric, value_of in replica_definitions.OF_STATUS.items():
        samples.add(metric, labels, value_of(status))
    samples.add_counts(replica_definitions.KV_BLOCKS, labels, block_counts(status))
    if status.num_host_blocks:
        samples.add_counts(replica_definitions.HOST_BLOCKS, labels, _host_block_counts(status))
    samples.add_counts(replica_definitions.REPLICA_ROLE, labels, {str(status.role): 1})
    if status.kv_layout or status.num_kv_offers:
        _collect_kv_moves(samples, labels, status)
    if status.num_state_slots:
        samples.add_counts(replica_definitions.STATE_SLOTS, labels, _state_slot_counts(status))
    if status.encoder_cache_bytes:
        held = status.encoder_output_bytes
        room = {"held": held, "free": max(0, status.encoder_cache_bytes - held)}
        samples.add_counts(replica_definitions.ENCODER_BYTES, labels, room)
        for metric, value_of in replica_definitions.OF_IMAGES.items():
            samples.add(metric, labels, value_of(status))
    if status.stores_blocks:
        blocks = {"disk": status.num_disk_blocks, "shared": status.num_shared_blocks}
        samples.add_counts(replica_definitions.STORED_BLOCKS, labels, blocks)
        sizes = {"disk": status.disk_bytes, "shared": status.shared_bytes}
        samples.add_counts(replica_definitions.STORED_BYTES, labels, sizes)
    for rank in status.ranks:
        _collect_rank(samples, labels, rank)


def _collect_kv_moves(samples: Samples, labels: tuple[str, str], status: ReplicaStatus) -> None:
    for metric, value_of in replica_definitions.OF_KV_MOVES.items():
        samples.add(metric, labels, value_of(status))
    failures = zip(KvFailure, status.num_kv_failures or [0] * len(KvFailure), strict=False)
    samples.add_counts(
        replica_definitions.KV_PULL_FAILURES, labels, {str(reason): count for reason, count in failures}
    )


def _collect_drafts(
    samples: Samples, labels: tuple[str, str], config: EngineConfig, status: ReplicaStatus
) -> None:
    if config.drafts_jump_forward:
        samples.add(replica_definitions.FORCED_TOKENS, labels, sum(status.num_accepted_tokens))
    if config.speculative is None:
        return
    for metric, value_of in replica_definitions.OF_DRAFTS.items():
        samples.add(metric, labels, value_of(status))
    accepted = {str(place): count for place, count in enumerate(status.num_accepted_tokens)}
    samples.add_counts(replica_definitions.SPEC_ACCEPTED_PER_POSITION, labels, accepted)


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


def _state_slot_counts(status: ReplicaStatus) -> dict[str, int]:
    active, snapshots = status.num_used_state_slots, status.num_snapshots
    counts = {"active": active, "snapshot": snapshots, "other": status.num_state_slots - active - snapshots}
    return counts | ({"host_snapshot": status.num_host_snapshots} if status.num_host_state_slots else {})


def _collect_rank(samples: Samples, labels: tuple[str, str], rank: RankStatus) -> None:
    number = str(rank.rank)
    samples.add(replica_definitions.RANK_INFO, (*labels, number, rank.node, rank.device), 1)
    usage = process_usage(rank.pid) if rank.node == socket.gethostname() else None
    if usage is not None:
        samples.add(replica_definitions.RANK_MEMORY, (*labels, number), usage.resident_bytes)
        samples.add(replica_definitions.RANK_CPU, (*labels, number), usage.cpu_s)


def _collect_cache_config(
    samples: Samples, labels: tuple[str, str], config: EngineConfig, status: ReplicaStatus
) -> None:
    sizes = str(status.block_size), str(status.num_blocks), str(status.num_host_blocks)
    prefix_caching = str(config.cache.prefix_caching)
    samples.add(
        replica_definitions.CACHE_CONFIG, (*labels, *sizes, config.cache.kv_cache_dtype, prefix_caching), 1
    )


def collect_fleet(samples: Samples, state: admin_pb2.GetStatusResponse) -> None:
    """Add the samples of a fleet's state."""
    fleet = from_message(FleetInfo, state)
    samples.add(fleet_definitions.STALE, (), bool(fleet.problem))
    for deployment in fleet.deployments:
        labels = (deployment.model,)
        samples.add(fleet_definitions.TARGET, labels, deployment.target_replicas)
        samples.add(fleet_definitions.MIN, labels, deployment.min_replicas)
        samples.add(fleet_definitions.MAX, labels, deployment.max_replicas)
        samples.add(fleet_definitions.REASON, (*labels, reason_label(deployment.reason)), 1)
    states = Counter((replica.model, replica.state or "unknown") for replica in fleet.replicas)
    for labels_of_state, count in states.items():
        samples.add(fleet_definitions.REPLICAS, labels_of_state, count)
    draining = sum(node.draining for node in fleet.nodes)
    samples.add_counts(
        fleet_definitions.NODES, (), {"draining": draining, "ready": len(fleet.nodes) - draining}
    )


def reason_label(reason: str) -> str:
    """Return the label of an autoscaler's reason: a fixed word, since the text has numbers in it."""
    words = reason.lstrip("0123456789. ")
    return next((label for beginning, label in REASONS.items() if words.startswith(beginning)), OTHER)
