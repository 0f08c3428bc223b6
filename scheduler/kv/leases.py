"""Leases: blocks of sequences that left, held until another replica has read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import NO_INTS
from ...proto.kv_transfer import KvGrant
from .block_pool import BlockPool
from .state_slots import StateSlots

# A lease that is not renewed ends after this time. A reader that lives renews it with each read; one that died costs
# the blocks for as long.
LEASE_S = 10.0
# A lease ends after this time, whoever renews it.
MAX_LEASE_S = 120.0
# Leases at once: bounds what the ranks list.
MAX_LEASES = 1024


@dataclass(slots=True)
class _Lease:
    """Blocks that are held for a reader.

    Attributes:
        request_id: of the sequence that left.
        state_slot: of the state after the blocks; 0 for none.
        ends_at: unless it is renewed.
        ends_by: whether it is renewed or not.
    """

    request_id: str
    block_ids: list[int]
    state_slot: int
    ends_at: float
    ends_by: float


class Leases:
    """The leases of one replica. Each has references to its blocks and state, and a generation of its own.

    The ranks learn of a lease from a plan that comes after the steps which write its blocks, and of its end from the
    first plan that may give the blocks to somebody else. So a read that finds the lease in effect afterwards has seen
    what was lent.

    Attributes:
        num_granted, num_expired: leases so far, and those that nobody released in time.
    """

    def __init__(self, pool: BlockPool, state_slots: StateSlots) -> None:
        self._pool, self._state_slots = pool, state_slots
        self._leases: dict[int, _Lease] = {}  # generation |-> lease, in the order of their grants
        self._grants: list[KvGrant] = []
        self._later_grants: list[KvGrant] = []  # of the plan after the next, which loads the blocks
        self._revoked: list[int] = []
        self.num_granted = self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> list[int]:
        """Return the blocks that are held, as often as they are."""
        return [block_id for lease in self._leases.values() for block_id in lease.block_ids]

    @property
    def held_states(self) -> list[int]:
        return [lease.state_slot for lease in self._leases.values() if lease.state_slot]

    @property
    def has_orders(self) -> bool:
        """Return whether the ranks do not know of all changes."""
        return bool(self._grants or self._later_grants or self._revoked)

    def grant(
        self,
        request_id: str,
        block_ids: list[int],
        now: float,
        *,
        are_loaded: bool = False,
        state_slot: int = 0,
    ) -> int:
        """Hold blocks, which are held or cached; return the generation of the lease.

        Args:
            state_slot: of `StateSlots.lend`, whose reference becomes that of the lease; 0 for none.
            are_loaded: the next plan fills some of them from host memory.
        """
        self._pool.share(block_ids)
        self.num_granted += 1
        generation = self.num_granted
        self._leases[generation] = _Lease(request_id, block_ids, state_slot, now + LEASE_S, now + MAX_LEASE_S)
        grants = self._later_grants if are_loaded else self._grants
        lent = [*block_ids, -state_slot] if state_slot else block_ids
        grants.append(KvGrant(generation, np.array(lent, np.int32)))
        return generation

    def renew(self, generation: int, now: float) -> None:
        """Let a lease go on from now; does nothing if it has ended."""
        if (lease := self._leases.get(generation)) is not None:
            lease.ends_at = min(now + LEASE_S, lease.ends_by)

    def end(self, generation: int, fence_step: int | None) -> None:
        """Release the blocks of a lease; does nothing if it has ended.

        Args:
            fence_step: as for BlockPool.release.
        """
        lease = self._leases.pop(generation, None)
        if lease is None:
            return
        self._pool.release(lease.block_ids[::-1], fence_step)
        if lease.state_slot:
            self._state_slots.end_loan(lease.state_slot, fence_step)
        for grants in (self._grants, self._later_grants):
            for position, grant in enumerate(grants):
                if grant.generation == generation:  # the ranks never hear of it
                    del grants[position]
                    return
        self._revoked.append(generation)

    def expire(self, now: float, fence_step: int | None) -> None:
        """End the leases that nobody has renewed or released in time."""
        for generation, lease in list(self._leases.items()):
            if now >= lease.ends_at:
                self.num_expired += 1
                self.end(generation, fence_step)

    def end_oldest(self, fence_step: int | None) -> bool:
        """End the oldest lease, since sequences need blocks; return whether there was one."""
        oldest = next(iter(self._leases), None)
        if oldest is None:
            return False
        self.num_expired += 1
        self.end(oldest, fence_step)
        return True

    def forget(self) -> None:
        """End all leases: the ranks have forgotten them. No step is in flight."""
        for generation in list(self._leases):
            self.end(generation, None)
        self._grants, self._later_grants, self._revoked = [], [], []

    def take(self) -> tuple[tuple[KvGrant, ...], IntArray]:
        """Return what the ranks do not know yet: new leases, and the generations of those that have ended."""
        grants, revoked = tuple(self._grants), self._revoked
        self._grants, self._later_grants, self._revoked = self._later_grants, [], []
        return grants, np.array(revoked, np.int32) if revoked else NO_INTS
