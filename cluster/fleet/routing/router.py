"""Router: chooses a replica for each request by cached prefix and load. Pure: no clock, no network, injected rng."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from ....proto.digests import CACHE_HASH_BYTES
from ....proto.stream import CacheReport
from .rendezvous import hash64, weights_of_pairs

# Hashes kept per replica, the most recent ones: about 12 MB, for two million tokens in blocks of 16.
MAX_HASHES = 131_072
# A replica may have this many queued tokens more than the least loaded replica before it counts as overloaded: about
# one step's tokens.
QUEUE_SLACK_TOKENS = 2048
# A replica may use this share of its KV memory more than the emptiest replica before it counts as overloaded.
KV_SLACK = 0.2
# Queued tokens of a replica that takes no requests: more than any queue.
_TAKES_NONE = 1 << 62


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of a replica.

    Attributes:
        queued_tokens: prompt tokens that were sent to the replica and not computed yet.
        kv_use: share of its KV blocks that running sequences hold, 0 to 1.
    """

    queued_tokens: int
    kv_use: float


class Router:
    """Chooses the replica with the longest cached prefix of a request, unless that replica is overloaded.

    A replica is overloaded if its queue exceeds the least loaded replica's by more than the computation that the
    prefix saves. Among equals, and if every replica with the prefix is overloaded, the less loaded of two random
    replicas is chosen (Mitzenmacher, "The power of two choices in randomized load balancing", 2001): loads are a
    second old, and with the minimum of all replicas every gateway would choose the same one.

    A request without a cached prefix goes to a replica by rendezvous hashing of its salt: a tenant's requests can
    share prefixes only with each other, so they should meet at one replica.

    The cost of a choice hardly depends on the number of replicas: one index has the holders of each hash, and the
    loads are arrays. A replica's *slot* is its place in the arrays and its bit in a set of replicas, which is an int.

    Args:
        block_size: tokens per KV block.
        rng: source of the random choices.
        max_hashes: hashes kept per replica.
    """

    def __init__(
        self, block_size: int, rng: random.Random | None = None, max_hashes: int = MAX_HASHES
    ) -> None:
        self._block_size = block_size
        self._rng = random.Random() if rng is None else rng
        self._max_hashes = max_hashes
        self._slots: dict[str, int] = {}  # replica_id |-> slot
        self._free_slots: list[int] = []
        self._names: list[str] = []  # slot |-> replica_id
        self._bits: list[int] = []  # slot |-> its bit: one int for all hashes that only this replica has
        self._caches: list[dict[bytes, None]] = []  # slot |-> hashes, least recent first
        self._holders: dict[bytes, int] = {}  # hash |-> replicas that have it
        self._window_blocks: list[int] = []  # slot |-> as in CacheReport
        self._windows: dict[int, int] = {0: 0}  # window_blocks |-> replicas
        self._taking = 0  # replicas that take requests
        # Of each slot; a replica that takes no requests counts as overloaded.
        self._queued: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._kv_use: npt.NDArray[np.float64] = np.empty(0)
        self._name_hashes: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def set_load(self, replica_id: str, load: ReplicaLoad | None) -> None:
        """Set a replica's load; None for a replica that takes no requests."""
        slot = self._slot_of(replica_id)
        if load is None:
            self._queued[slot], self._kv_use[slot] = _TAKES_NONE, np.inf
            self._taking &= ~self._bits[slot]
        else:
            self._queued[slot], self._kv_use[slot] = load.queued_tokens, load.kv_use
            self._taking |= self._bits[slot]

    def set_loads(self, loads: Mapping[str, ReplicaLoad]) -> None:
        """Set the load of all replicas; those that are not in `loads` take no requests."""
        for replica_id in [replica_id for replica_id in self._slots if replica_id not in loads]:
            self.set_load(replica_id, None)
        for replica_id, load in loads.items():
            self.set_load(replica_id, load)

    def choose(self, hashes: Sequence[bytes], salt: bytes) -> str | None:
        """Return the replica that should run a request; None if no replica takes requests.

        Args:
            hashes: hash of each full block of the request, in order; see `prefix_cache.prefix_hashes`.
            salt: the request's cache salt; empty if it has none.
        """
        if not self._taking:
            return None
        num_blocks, holders = self._longest_prefix(hashes, self._taking)
        slack = max(num_blocks * self._block_size, QUEUE_SLACK_TOKENS)
        has_room = self._queued <= self._queued.min() + slack
        has_room &= self._kv_use <= self._kv_use.min() + KV_SLACK
        if num_blocks:
            preferred = has_room & self._is_in(holders)
        elif salt:
            slot = self._slot_of_tenant(salt)
            preferred = np.zeros(len(self._names), np.bool_)
            preferred[slot] = has_room[slot]
        else:
            preferred = has_room
        candidates = np.flatnonzero(preferred)
        if not len(candidates):
            candidates = np.flatnonzero(self._is_in(self._taking))
        return self._names[self._less_loaded_of_two(candidates)]

    def num_cached_blocks(self, replica_id: str, hashes: Iterable[bytes]) -> int:
        """Return the blocks of the longest prefix that the replica has cached, or will have when it computed them."""
        slot = self._slots.get(replica_id)
        return 0 if slot is None else self._longest_prefix(hashes, self._bits[slot])[0]

    def longest_prefix(self, hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return the blocks of the longest prefix that a replica has cached, and the replicas that have it.

        Only replicas that take requests count.
        """
        num_blocks, holders = self._longest_prefix(hashes, self._taking)
        return num_blocks, [self._names[slot] for slot in np.flatnonzero(self._is_in(holders))]

    def record_submit(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """Count a submitted request's blocks as cached at the replica from now on.

        If the replica never computes them, the next request with that prefix goes there and computes them.
        """
        self._add(self._slot_of(replica_id), hashes)

    def apply_report(self, replica_id: str, report: CacheReport) -> None:
        """Apply a replica's cache report: changes since its last one, or the whole cache if `since` is 0."""
        slot = self._slot_of(replica_id)
        self._set_window(slot, report.window_blocks)
        added = dict.fromkeys(_split_hashes(report.added))
        if report.since == 0:
            self._drop(slot, [block_hash for block_hash in self._caches[slot] if block_hash not in added])
        self._drop(slot, _split_hashes(report.removed))
        self._add(slot, added)

    def remove_replica(self, replica_id: str) -> None:
        """Drop everything about the replica."""
        if replica_id not in self._slots:
            return
        self.set_load(replica_id, None)
        slot = self._slots.pop(replica_id)
        self._drop(slot, list(self._caches[slot]))
        self._set_window(slot, 0)
        self._free_slots.append(slot)

    def _slot_of(self, replica_id: str) -> int:
        """Return the slot of a replica; one that is new gets a slot, and takes no requests yet."""
        slot = self._slots.get(replica_id)
        if slot is not None:
            return slot
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._names)
            self._names.append("")
            self._bits.append(1 << slot)
            self._caches.append({})
            self._window_blocks.append(0)
            self._windows[0] |= 1 << slot
            self._queued = np.append(self._queued, np.int64(_TAKES_NONE))
            self._kv_use = np.append(self._kv_use, np.inf)
            self._name_hashes = np.append(self._name_hashes, np.uint64(0))
        self._slots[replica_id], self._names[slot] = slot, replica_id
        self._name_hashes[slot] = hash64(replica_id.encode())
        return slot

    def _set_window(self, slot: int, window_blocks: int) -> None:
        self._windows[self._window_blocks[slot]] ^= self._bits[slot]
        self._window_blocks[slot] = window_blocks
        self._windows[window_blocks] = self._windows.get(window_blocks, 0) | self._bits[slot]

    def _add(self, slot: int, hashes: Iterable[bytes]) -> None:
        cache, holders, bit = self._caches[slot], self._holders, self._bits[slot]
        for block_hash in hashes:
            if block_hash in cache:
                del cache[block_hash]  # it becomes the most recent
            else:
                others = holders.get(block_hash)
                holders[block_hash] = bit if others is None else others | bit
            cache[block_hash] = None
        # Many at once: the first key of a dict is found in a time that grows with the keys deleted before it.
        if len(cache) > self._max_hashes + self._max_hashes // 64:
            self._drop(slot, list(islice(cache, len(cache) - self._max_hashes)))

    def _drop(self, slot: int, hashes: Iterable[bytes]) -> None:
        cache, holders, bit = self._caches[slot], self._holders, self._bits[slot]
        for block_hash in hashes:
            if block_hash not in cache:
                continue
            del cache[block_hash]
            others = holders[block_hash] ^ bit
            if others:
                holders[block_hash] = others
            else:
                del holders[block_hash]

    def _longest_prefix(self, hashes: Iterable[bytes], replicas: int) -> tuple[int, int]:
        """Return the blocks of the longest prefix that any of these replicas has cached, and those that have it."""
        longest = all_holders = 0
        for window_blocks, of_window in self._windows.items():
            members = of_window & replicas
            if not members:
                continue
            num_blocks, holders = (
                self._longest_in_windows(hashes, members, window_blocks)
                if window_blocks
                else self._longest_whole(hashes, members)
            )
            if num_blocks > longest:
                longest, all_holders = num_blocks, holders
            elif num_blocks == longest > 0:
                all_holders |= holders
        return longest, all_holders

    def _longest_whole(self, hashes: Iterable[bytes], replicas: int) -> tuple[int, int]:
        """Return the longest prefix of which a replica has all blocks."""
        holders_of, num_blocks, holders = self._holders.get, 0, replicas
        for block_hash in hashes:
            both = holders & holders_of(block_hash, 0)
            if not both:
                break
            holders = both
            num_blocks += 1
        return num_blocks, holders

    def _longest_in_windows(
        self, hashes: Iterable[bytes], replicas: int, window_blocks: int
    ) -> tuple[int, int]:
        """Return the longest prefix of which a replica has all blocks, or the last `window_blocks`.

        A window is the end of a chunk of `window_blocks` and the beginning of the next one, so that the replicas
        that have all of it are an intersection of two sets (van Herk, 1992).
        """
        holders = [replicas & self._holders.get(block_hash, 0) for block_hash in hashes]
        from_start, to_end = holders.copy(), holders.copy()  # of the chunk
        for index in range(1, len(holders)):
            if index % window_blocks:
                from_start[index] &= from_start[index - 1]
        for index in range(len(holders) - 2, -1, -1):
            if (index + 1) % window_blocks:
                to_end[index] &= to_end[index + 1]
        for index in range(len(holders) - 1, -1, -1):
            start = max(0, index + 1 - window_blocks)
            if found := from_start[index] & (to_end[start] if start else replicas):
                return index + 1, found
        return 0, 0

    def _is_in(self, replicas: int) -> npt.NDArray[np.bool_]:
        """Return a bool per slot: whether its replica is in the set."""
        num_slots = len(self._names)
        raw = np.frombuffer(replicas.to_bytes(num_slots // 8 + 1, "little"), np.uint8)
        return np.unpackbits(raw, count=num_slots, bitorder="little").view(np.bool_)

    def _slot_of_tenant(self, salt: bytes) -> int:
        """Return the slot with the largest weight for the salt, of the replicas that take requests."""
        weights = weights_of_pairs(self._name_hashes, hash64(salt)) | np.uint64(1)
        return int(np.argmax(np.where(self._is_in(self._taking), weights, np.uint64(0))))

    def _less_loaded_of_two(self, slots: npt.NDArray[np.intp]) -> int:
        """Return the less loaded of two random slots."""
        pair = [int(slots[index]) for index in self._rng.sample(range(len(slots)), min(2, len(slots)))]
        return min(pair, key=lambda slot: (self._queued[slot] // QUEUE_SLACK_TOKENS, self._kv_use[slot]))


def _split_hashes(hashes: bytes) -> Iterable[bytes]:
    width = CACHE_HASH_BYTES
    return (hashes[start : start + width] for start in range(0, len(hashes), width))
