"""Subset: the replicas that one of many gateways uses, so that connections do not grow with both. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from .rendezvous import Hashes, hashes_of, weights_of_pairs

# Replicas that a gateway uses on average. A fleet that has no more is used whole by each gateway.
SUBSET_SIZE = 128
# Gateways that use each replica, at least: one that ends leaves no replica without requests.
MIN_GATEWAYS = 3


class Subset:
    """One gateway's choice among the replicas of a model that have the same version.

    Each replica ranks the gateways by rendezvous hashing, and is used by the first ones: by equally many as any other
    replica. A gateway that knows the others computes its own ranks, so that nobody assigns anything: if a gateway
    comes or goes, the changes are about SUBSET_SIZE connections in all, and if a replica does, they are its own.
    The number of replicas of a gateway varies: 128 +- 11 with a thousand replicas and a hundred gateways.

    Args:
        gateway_id: the gateway's own id.
        size: replicas that a gateway uses on average.
    """

    def __init__(self, gateway_id: str, size: int) -> None:
        self._gateway_id = gateway_id
        self._size = size
        self._others: frozenset[str] = frozenset()
        self._ranks: dict[str, int] = {}  # replica_id |-> gateways that come before this one

    def choose(
        self,
        gateway_ids: Collection[str],
        replica_ids: Iterable[str],
        failed: Collection[str] = (),
        num_expected: int = 0,
    ) -> set[str]:
        """Return the replicas to use.

        Args:
            gateway_ids: the gateways; empty if they are not known.
            replica_ids: the replicas that are ready.
            failed: replicas that this gateway cannot use at present. Each of its subset is replaced by the next one.
            num_expected: replicas with those that will soon be ready, in place of others or more of them.
        """
        replicas = sorted(replica_ids)
        num_replicas = max(num_expected, len(replicas))
        if num_replicas <= self._size:
            self._others, self._ranks = frozenset(), {}
            return set(replicas)
        if not gateway_ids:
            return set(self._by_own_weight(replicas)[: self._size])
        others = frozenset(gateway_ids) - {self._gateway_id}
        self._update_ranks(others, replicas)
        per_replica = max(MIN_GATEWAYS, math.ceil(self._size * (1 + len(others)) / num_replicas))
        ordered = sorted(replicas, key=self._ranks.__getitem__)
        count = max(sum(rank < per_replica for rank in self._ranks.values()), self._size // 2)
        chosen, rest = set(ordered[:count]), (each for each in ordered[count:] if each not in failed)
        return chosen.union(islice(rest, len(chosen.intersection(failed))))

    def _by_own_weight(self, replicas: Sequence[str]) -> list[str]:
        """Return the replicas of which this gateway is likely to be among the first, those first."""
        weights = self._weights(replicas, [self._gateway_id])[:, 0]
        return [replicas[index] for index in np.argsort(weights)[::-1]]

    def _update_ranks(self, others: frozenset[str], replicas: Sequence[str]) -> None:
        """Bring the ranks up to date. The cost is that of the gateways and replicas that are new or gone."""
        joined, left = others - self._others, self._others - others
        kept = [each for each in replicas if each in self._ranks]
        new = [each for each in replicas if each not in self._ranks]
        ranks = {each: self._ranks[each] for each in kept}
        if joined or left:
            changes = self._num_before(kept, joined) - self._num_before(kept, left)
            ranks = {each: ranks[each] + int(change) for each, change in zip(kept, changes, strict=True)}
        if new:
            ranks |= zip(new, map(int, self._num_before(new, others)), strict=True)
        self._others, self._ranks = others, ranks

    def _num_before(self, replicas: Sequence[str], gateways: Collection[str]) -> npt.NDArray[np.intp]:
        """Return how many of the gateways come before this one at each replica, [N]."""
        own = self._weights(replicas, [self._gateway_id])
        counts: npt.NDArray[np.intp] = np.count_nonzero(self._weights(replicas, gateways) > own, axis=1)
        return counts

    @staticmethod
    def _weights(replicas: Sequence[str], gateways: Collection[str]) -> Hashes:
        """Return the weight of each gateway at each replica, [replicas, gateways]."""
        return weights_of_pairs(hashes_of(replicas)[:, None], hashes_of(gateways)[None, :])
