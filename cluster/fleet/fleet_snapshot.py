"""What the autoscaler is shown of one model: its replicas' own accounts, and what its gateways hold."""

from __future__ import annotations

from collections.abc import Iterable

from ...proto.stream import ReplicaStatus
from ..controller_api.demand import Demand
from ..controller_api.fleet_state import ReplicaState
from .autoscaler import FleetSnapshot, ReplicaSample

# Gateways with waiting requests report every second; one that has been silent for so long is gone.
REPORT_LIFETIME_S = 10.0


class DemandBook:
    """One model's demand, over all gateways.

    Attributes:
        cold_start_s: what its latest replica needed to become ready; None: none has.
    """

    def __init__(self) -> None:
        self._num_requests = self._num_tokens = 0
        self._waiting: dict[
            str, tuple[float, Demand]
        ] = {}  # gateway_id |-> when it last said what waits there
        self.cold_start_s: float | None = None

    def add(self, gateway_id: str, demand: Demand, now: float) -> None:
        """A gateway's report."""
        self._num_requests += demand.num_requests
        self._num_tokens += demand.num_tokens
        self._waiting[gateway_id] = now, demand

    def take(self, now: float) -> Demand:
        """What has come since the last call, and what waits now."""
        self._waiting = {
            gateway_id: (at, demand)
            for gateway_id, (at, demand) in self._waiting.items()
            if now - at < REPORT_LIFETIME_S and demand.num_waiting
        }
        num_requests, num_tokens = self._num_requests, self._num_tokens
        self._num_requests = self._num_tokens = 0
        return Demand(
            num_requests,
            num_tokens,
            sum(demand.num_waiting for _, demand in self._waiting.values()),
            sum(demand.num_waiting_tokens for _, demand in self._waiting.values()),
        )


def observe(
    now: float,
    replicas: Iterable[tuple[ReplicaState, ReplicaStatus | None]],
    demand: DemandBook,
    max_num_seqs: int,
) -> FleetSnapshot:
    """The snapshot of this moment.

    Args:
        replicas: state and latest status of each.
        max_num_seqs: sequences that a replica may run at once.
    """
    count = demand.take(now)
    ended = ReplicaState.STOPPED, ReplicaState.FAILED
    return FleetSnapshot(
        time_s=now,
        replicas=tuple(
            _sample(state, status, max_num_seqs) for state, status in replicas if state not in ended
        ),
        buffered_requests=count.num_waiting,
        buffered_tokens=count.num_waiting_tokens,
        arrived_requests=count.num_requests,
        arrived_tokens=count.num_tokens,
        cold_start_s=demand.cold_start_s,
    )


def _sample(state: ReplicaState, status: ReplicaStatus | None, max_num_seqs: int) -> ReplicaSample:
    if status is None:
        return ReplicaSample(state)
    return ReplicaSample(
        state,
        queued_tokens=status.queued_tokens,
        num_requests=status.num_running + status.num_waiting,
        kv_use=status.kv_use,
        row_use=min(1.0, status.num_running / max_num_seqs),
        oldest_wait_s=status.oldest_wait_s,
        tokens_per_s=status.tokens_per_s,
    )
