"""Input of the autoscaler: DemandCounter and the FleetSnapshot of one model."""

from __future__ import annotations

from collections.abc import Iterable

from ....proto.replica_status import ReplicaStatus
from .autoscaler import FleetSnapshot, ReplicaSample
from .demand import Demand
from .fleet_state import ReplicaState

# Gateways with waiting requests report every second; after this much silence a gateway's report expires.
REPORT_LIFETIME_S = 10.0


class DemandCounter:
    """One model's demand over all gateways.

    Attributes:
        cold_start_s: time that the latest replica needed to become ready; None if none was measured.
    """

    def __init__(self) -> None:
        self._num_requests = self._num_tokens = 0
        self._latest: dict[str, tuple[float, Demand]] = {}  # gateway_id |-> (time, its latest report)
        self.cold_start_s: float | None = None

    def add(self, gateway_id: str, demand: Demand, now: float) -> None:
        """Add a gateway's report."""
        self._num_requests += demand.num_requests
        self._num_tokens += demand.num_tokens
        self._latest[gateway_id] = now, demand

    def collect(self, now: float) -> Demand:
        """Return the requests that arrived since the last call, and those that wait now."""
        self._latest = {
            gateway_id: (at, demand)
            for gateway_id, (at, demand) in self._latest.items()
            if now - at < REPORT_LIFETIME_S and demand.num_waiting
        }
        num_requests, num_tokens = self._num_requests, self._num_tokens
        self._num_requests = self._num_tokens = 0
        return Demand(
            num_requests,
            num_tokens,
            sum(demand.num_waiting for _, demand in self._latest.values()),
            sum(demand.num_waiting_tokens for _, demand in self._latest.values()),
        )


def take_snapshot(
    now: float,
    replicas: Iterable[tuple[ReplicaState, ReplicaStatus | None]],
    demand: DemandCounter,
) -> FleetSnapshot:
    """Return the model's snapshot; resets the arrivals of `demand`.

    Args:
        replicas: (state, latest status) of each replica.
    """
    collected = demand.collect(now)
    ended = ReplicaState.STOPPED, ReplicaState.FAILED
    return FleetSnapshot(
        time_s=now,
        replicas=tuple(_sample(state, status) for state, status in replicas if state not in ended),
        buffered_requests=collected.num_waiting,
        buffered_tokens=collected.num_waiting_tokens,
        arrived_requests=collected.num_requests,
        arrived_tokens=collected.num_tokens,
        cold_start_s=demand.cold_start_s,
    )


def _sample(state: ReplicaState, status: ReplicaStatus | None) -> ReplicaSample:
    if status is None:
        return ReplicaSample(state)
    return ReplicaSample(
        state,
        queued_tokens=status.queued_tokens,
        num_requests=status.num_running + status.num_waiting,
        kv_use=status.kv_use,
        row_use=min(1.0, status.num_running / status.max_num_seqs),
        oldest_wait_s=status.oldest_wait_s,
        tokens_per_s=status.tokens_per_s,
    )
