"""Load of a gateway's models, from the latest status of their replicas."""

from __future__ import annotations

from ....proto import admin_pb2
from ....proto.replica_status import ReplicaStatus
from .served_models import ServedModel, ServedModels


def current_load(models: ServedModels) -> admin_pb2.GetLoadResponse:
    """Return the load of each model. Never waits."""
    return admin_pb2.GetLoadResponse(models=map(_load_of, models))


def _load_of(model: ServedModel) -> admin_pb2.ModelLoad:
    pool = model.pool
    statuses = [
        client.latest_status
        for replica_id, client in pool.clients.items()
        if not pool.why_unavailable(replica_id) and client.latest_status is not None
    ]
    return admin_pb2.ModelLoad(
        model=model.name,
        num_ready_replicas=len(statuses),
        num_running=sum(status.num_running for status in statuses),
        num_waiting=sum(status.num_waiting for status in statuses),
        num_unplaced=pool.num_waiting,
        num_queued_tokens=sum(status.queued_tokens for status in statuses),
        kv_use=_mean_kv_use(statuses),
        tokens_per_s=sum(status.tokens_per_s for status in statuses),
        queue_delay_s=pool.queue_delay_s,
        fullest_kv_use=max((max(each.kv_use, each.fullest_kv_use) for each in statuses), default=0.0),
    )


def _mean_kv_use(statuses: list[ReplicaStatus]) -> float:
    return sum(status.kv_use for status in statuses) / len(statuses) if statuses else 0.0
