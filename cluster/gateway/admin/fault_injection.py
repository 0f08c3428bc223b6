"""Faults that operators cause in the replicas of a gateway, if its server permits them."""

from __future__ import annotations

from ....proto import admin_pb2
from ....proto.errors import ConfigError, InvalidRequest
from ....proto.faults import SIGNALS, Fault, FaultKind
from .services import GatewayServices

_KINDS = {
    admin_pb2.FAULT_KIND_KILL: FaultKind.KILL,
    admin_pb2.FAULT_KIND_STOP: FaultKind.STOP,
    admin_pb2.FAULT_KIND_EXCEPTION: FaultKind.EXCEPTION,
    admin_pb2.FAULT_KIND_SLOW: FaultKind.SLOW,
    admin_pb2.FAULT_KIND_POISON: FaultKind.POISON,
}


async def inject_fault(
    services: GatewayServices, message: admin_pb2.InjectFaultRequest
) -> admin_pb2.InjectFaultResponse:
    """Cause the fault that an operator asks for.

    Raises:
        ConfigError: the server does not permit faults.
        InvalidRequest: no such replica or process, or the process cannot have such a fault.
        ReplicaUnavailable: the process does not run or does not answer.
    """
    if services.faults is None:
        raise ConfigError("this server permits no faults; start it with --enable-chaos for a game day")
    rank = message.rank if message.HasField("rank") else None
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequest("kind", f"is {message.kind}, which is no kind of fault")
    if rank is None and kind not in SIGNALS:
        raise InvalidRequest(
            "kind", f"is {kind}, which only ranks have; a scheduler can be killed or stopped"
        )
    fault = Fault(kind, message.delay_s, message.duration_s, message.token_id)
    replica_id = _find_replica(services, message.replica_id)
    pid = await services.faults.inject(replica_id, rank, fault)
    return admin_pb2.InjectFaultResponse(replica_id=replica_id, pid=pid)


def _find_replica(services: GatewayServices, prefix: str) -> str:
    known = sorted(replica_id for model in services.models for replica_id in model.pool.clients)
    found = [prefix] if prefix in known else [each for each in known if each.startswith(prefix)]
    if len(found) != 1:
        problem = "which is no replica" if not found else "which several replicas have"
        raise InvalidRequest(
            "replica_id", f"is {prefix!r}, {problem}; there are {', '.join(known) or 'none'}"
        )
    return found[0]
