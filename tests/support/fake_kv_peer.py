"""FakeKvPeer: the ranks' side of KV that travels, for the fake worker group; reads happen when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from quire.proto.kv_transfer import KvFailure, KvOrders, KvPull, KvReport, KvReportKind

# A fake block: (group, digest of the sequence up to the token) of each token.
Block = list[tuple[int, bytes]]


@dataclass
class FakeKvNetwork:
    """The peers that can reach each other.

    Attributes:
        peers: endpoint |-> its peer; endpoints of earlier lives are gone.
        verifies: readers verify the lease and the checksum after the read, as real ones do.
        tears: a read takes the blocks while the owner writes to them.
        lock: held by a read, and by ranks that apply orders: each replica may have a thread of its own.
    """

    lock: ClassVar = threading.RLock()
    peers: dict[str, FakeKvPeer] = field(default_factory=dict)
    verifies: bool = True
    tears: bool = False


class FakeKvPeer:
    """One replica's only rank.

    Attributes:
        reports: not taken yet; a test may lose or reorder them.

    Args:
        kv_of, states_of: return the blocks and the states of the fake worker group.
    """

    def __init__(
        self,
        network: FakeKvNetwork,
        name: str,
        kv_of: Callable[[], list[Block]],
        weights: str = "w",
        states_of: Callable[[], list[bytes]] = list,
    ) -> None:
        self._network, self._name, self._kv_of, self._weights = network, name, kv_of, weights
        self._states_of = states_of
        self._life = 0
        self.restart()

    def restart(self) -> None:
        """Forget all leases and pulls; serve at another endpoint."""
        self._network.peers.pop(self.endpoint, None)
        self._life += 1
        self._network.peers[self.endpoint] = self
        self.leases: dict[int, set[int]] = {}
        self.pulls: dict[int, KvPull] = {}
        self._done: dict[int, KvPull] = {}
        self.reports = [KvReport(0, KvReportKind.SERVES, name=self.endpoint, weights=self._weights)]

    @property
    def endpoint(self) -> str:
        return f"{self._name}.{self._life}"

    def apply(self, orders: KvOrders | None) -> tuple[KvReport, ...]:
        """Carry out a plan's orders, in the order of a real rank; return the reports."""
        with self._network.lock:
            return self._apply(orders or KvOrders())

    def _apply(self, orders: KvOrders) -> tuple[KvReport, ...]:
        for generation in orders.revoked.tolist():
            self.leases.pop(generation, None)
        for grant in orders.grants:
            self.leases[grant.generation] = set(grant.block_ids.tolist())
        for pull in orders.pulls:
            self.pulls[pull.pull_id] = self._done[pull.pull_id] = pull
        for pull_id in orders.ended.tolist():
            if pull_id in self.pulls:
                self._report(self.pulls.pop(pull_id), KvFailure.CANCELED)
            done = self._done.pop(pull_id)
            owner = self._network.peers.get(done.endpoints[0])
            if owner is not None:
                owner.reports.append(KvReport(0, KvReportKind.RELEASED, done.generation))
        reports, self.reports = tuple(self.reports), []
        return reports

    def read(self, pull_id: int) -> None:
        """Read all blocks of a pull."""
        with self._network.lock:
            self._read(pull_id)

    def _read(self, pull_id: int) -> None:
        pull = self.pulls.pop(pull_id)
        owner = self._network.peers.get(pull.endpoints[0])
        if owner is None:
            self._report(pull, KvFailure.UNREACHABLE)
            return
        sources, targets = pull.sources.tolist(), pull.targets.tolist()
        leased = owner.leases.get(pull.generation, set())
        if self._network.verifies and not set(sources) <= leased:
            self._report(pull, KvFailure.STALE)
            return
        for source, target in zip(sources, targets, strict=True):
            if source < 0:  # a state
                self._states_of()[-target] = owner._states_of()[-source]
            else:
                self._kv_of()[target] = list(owner._kv_of()[source])
        if self._network.tears:
            self._tear(targets[-1])
            if self._network.verifies:
                self._report(pull, KvFailure.CORRUPT, [len(targets) - 1])
                return
        owner.reports.append(KvReport(0, KvReportKind.RENEWED, pull.generation))
        self._report(pull, None)

    def _tear(self, target: int) -> None:
        if target < 0:
            self._states_of()[-target] = b"torn"
        else:
            self._kv_of()[target][-1] = (-1, b"torn")

    def _report(self, pull: KvPull, reason: KvFailure | None, failed: Sequence[int] | None = None) -> None:
        places = (
            list(failed) if failed is not None else [] if reason is None else list(range(pull.targets.size))
        )
        self.reports.append(
            KvReport(
                0, KvReportKind.PULLED, pull.pull_id, "" if reason is None else f"{reason}: {pull.endpoints[0]}",
                failed=np.array(places, np.int32), num_bytes=100, seconds=1e-6,
            )
        )  # fmt: skip
