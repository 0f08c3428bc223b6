"""KV that travels between simulated replicas: orders of plans, and reports of ranks, with the time that they take."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ...proto.config import EngineConfig
from ...proto.kv_layout import layout_of
from ...proto.kv_transfer import KvOrders, KvPull, KvReport, KvReportKind
from ...proto.model.registry import state_layers
from ...proto.model.state import state_bytes
from ...proto.options.sections import DTYPES

# Ranks without anything to compute report after this time at the latest, as real ones do.
WAIT_S = 0.05


@dataclass(slots=True)
class KvNetwork:
    """Replicas that read each other's blocks.

    Attributes:
        bytes_per_s: that a rank reads from another one, while nobody else reads from the same replica.
        peers: replica_id |-> its ranks.
    """

    bytes_per_s: float
    peers: dict[str, KvPeer] = field(default_factory=dict)


class KvPeer:
    """The ranks of a replica. A lender serves one reader after the other; leases never end before their release."""

    def __init__(self, network: KvNetwork, replica_id: str, config: EngineConfig) -> None:
        self._network, self._num_ranks = network, config.parallel.tensor_parallel_size
        own_state_bytes = state_bytes(
            state_layers(config.model, self._num_ranks), DTYPES.get(config.model.dtype, 2)
        )
        # Of a block of each group, and of a state, which a pull counts after the groups.
        self._unit_bytes = np.array([*layout_of(config, 0, "").block_bytes, own_state_bytes])
        self._lends_until = 0.0
        self._endpoint_of: dict[int, tuple[str, int]] = {}  # pull_id |-> (replica, lease)
        self._reports: deque[tuple[float, KvReport]] = deque()  # in the order of their times
        for rank in range(self._num_ranks):
            serves = KvReport(rank, KvReportKind.SERVES, name=replica_id, num_bytes=own_state_bytes)
            self._reports.append((0.0, serves))
        network.peers[replica_id] = self

    def apply(self, orders: KvOrders, now: float) -> None:
        """Carry out a plan's orders."""
        for pull in orders.pulls:
            self._pull(pull, now)
        for pull_id in orders.ended.tolist():
            replica_id, generation = self._endpoint_of.pop(pull_id)
            lender = self._network.peers.get(replica_id)
            if lender is not None:
                lender._report(now, KvReport(0, KvReportKind.RELEASED, generation))

    def _pull(self, pull: KvPull, now: float) -> None:
        """Read a pull's blocks; of a lender that is gone, none."""
        replica_id = pull.endpoints[0]
        self._endpoint_of[pull.pull_id] = replica_id, pull.generation
        lender = self._network.peers.get(replica_id)
        num_bytes = int(self._unit_bytes[: pull.group_lens.size] @ pull.group_lens)
        seconds = num_bytes / self._network.bytes_per_s
        failed, reason = np.arange(pull.targets.size, dtype=np.int32), "unreachable: it has ended"
        done_at = now
        if lender is not None:
            done_at = lender._lends_until = max(now, lender._lends_until) + seconds
            failed, reason = failed[:0], ""
            lender._report(done_at, KvReport(0, KvReportKind.RENEWED, pull.generation))
        for rank in range(self._num_ranks):
            self._report(
                done_at,
                KvReport(
                    rank, KvReportKind.PULLED, pull.pull_id, reason, failed=failed, num_bytes=num_bytes,
                    seconds=seconds,
                ),
            )  # fmt: skip

    def _report(self, at: float, report: KvReport) -> None:
        later = [each for each in self._reports if each[0] > at]
        while self._reports and self._reports[-1][0] > at:
            self._reports.pop()
        self._reports.append((at, report))
        self._reports.extend(later)

    def next_report_at(self, now: float) -> float:
        """Return when ranks without anything to compute report."""
        due = self._reports[0][0] if self._reports else math.inf
        return min(max(due, now), now + WAIT_S)

    def take_reports(self, now: float) -> tuple[KvReport, ...]:
        """Return what has happened until now."""
        taken = []
        while self._reports and self._reports[0][0] <= now:
            taken.append(self._reports.popleft()[1])
        return tuple(taken)
