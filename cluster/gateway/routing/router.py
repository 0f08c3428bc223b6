"""Router: chooses a replica for each request by cached prefix and load. Pure: no clock, no network, injected rng."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ....proto.digests import CACHE_HASH_BYTES
from ....proto.stream import CacheReport

# Hashes kept per replica, the most recent ones: about 12 MB, for two million tokens in blocks of 16.
MAX_HASHES = 131_072
# A replica may have this many queued tokens more than the least loaded replica before it counts as overloaded: about
# one step's tokens.
QUEUE_SLACK_TOKENS = 2048
# A replica may use this share of its KV memory more than the emptiest replica before it counts as overloaded.
KV_SLACK = 0.2


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

    A request without a cached prefix goes to a replica by rendezvous hashing of its salt (Thaler and Ravishankar,
    1998): a tenant's requests can share prefixes only with each other, so they should meet at one replica.

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
        self._caches: dict[str, dict[bytes, None]] = {}  # replica_id |-> hashes, least recent first
        self._window_blocks: dict[str, int] = {}  # replica_id |-> as in CacheReport

    def choose(self, hashes: Sequence[bytes], salt: bytes, replicas: Mapping[str, ReplicaLoad]) -> str:
        """Return the replica that should run a request.

        Args:
            hashes: hash of each full block of the request, in order; see `prefix_cache.prefix_hashes`.
            salt: the request's cache salt; empty if it has none.
            replicas: replica_id |-> load, of the replicas that take requests; at least one.
        """
        matches = {replica_id: self.num_cached_blocks(replica_id, hashes) for replica_id in replicas}
        longest = max(matches.values())
        if longest:
            preferred = [replica_id for replica_id in replicas if matches[replica_id] == longest]
        elif salt:
            preferred = [max(replicas, key=lambda replica_id: _rendezvous_weight(salt, replica_id))]
        else:
            preferred = list(replicas)
        candidates = _without_overloaded(preferred, replicas, longest * self._block_size)
        return self._less_loaded_of_two(candidates or list(replicas), replicas)

    def num_cached_blocks(self, replica_id: str, hashes: Iterable[bytes]) -> int:
        """Return the blocks of the longest prefix that the replica has cached, or will have when it computed them."""
        cache = self._caches.get(replica_id)
        if not cache:
            return 0
        if window_blocks := self._window_blocks.get(replica_id, 0):
            return _num_cached_blocks_in_windows(cache, hashes, window_blocks)
        num_blocks = 0
        for block_hash in hashes:
            if block_hash not in cache:
                break
            num_blocks += 1
        return num_blocks

    def record_submit(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """Count a submitted request's blocks as cached at the replica from now on.

        If the replica never computes them, the next request with that prefix goes there and computes them.
        """
        self._add(replica_id, hashes)

    def apply_report(self, replica_id: str, report: CacheReport) -> None:
        """Apply a replica's cache report: changes since its last one, or the whole cache if `since` is 0."""
        if report.since == 0:
            self._caches.pop(replica_id, None)
        self._window_blocks[replica_id] = report.window_blocks
        cache = self._caches.get(replica_id, {})
        for block_hash in _split_hashes(report.removed):
            cache.pop(block_hash, None)
        self._add(replica_id, _split_hashes(report.added))

    def remove_replica(self, replica_id: str) -> None:
        """Drop everything about the replica."""
        self._caches.pop(replica_id, None)
        self._window_blocks.pop(replica_id, None)

    def _add(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        cache = self._caches.setdefault(replica_id, {})
        for block_hash in hashes:
            cache.pop(block_hash, None)
            cache[block_hash] = None
        while len(cache) > self._max_hashes:
            del cache[next(iter(cache))]

    def _less_loaded_of_two(self, candidates: Sequence[str], replicas: Mapping[str, ReplicaLoad]) -> str:
        """Return the less loaded of two random candidates."""
        pair = self._rng.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda replica_id: _load_key(replicas[replica_id]))


def _num_cached_blocks_in_windows(
    cache: Container[bytes], hashes: Iterable[bytes], window_blocks: int
) -> int:
    """Return the blocks of the longest prefix of which all blocks, or the last `window_blocks`, are cached."""
    longest = run = 0
    for index, block_hash in enumerate(hashes):
        run = run + 1 if block_hash in cache else 0
        if run >= min(index + 1, window_blocks):
            longest = index + 1
    return longest


def _without_overloaded(
    candidates: Iterable[str], replicas: Mapping[str, ReplicaLoad], saved_tokens: int
) -> list[str]:
    """Return the candidates that are not overloaded for a request of which `saved_tokens` tokens are cached there."""
    max_queued = min(load.queued_tokens for load in replicas.values()) + max(saved_tokens, QUEUE_SLACK_TOKENS)
    max_kv_use = min(load.kv_use for load in replicas.values()) + KV_SLACK
    return [
        replica_id
        for replica_id in candidates
        if replicas[replica_id].queued_tokens <= max_queued and replicas[replica_id].kv_use <= max_kv_use
    ]


def _load_key(load: ReplicaLoad) -> tuple[int, float]:
    """Return a sort key: the queue in units of QUEUE_SLACK_TOKENS, then the KV use."""
    return load.queued_tokens // QUEUE_SLACK_TOKENS, load.kv_use


def _rendezvous_weight(salt: bytes, replica_id: str) -> bytes:
    return blake2b(salt + b"\0" + replica_id.encode(), digest_size=8).digest()


def _split_hashes(hashes: bytes) -> Iterable[bytes]:
    width = CACHE_HASH_BYTES
    return (hashes[start : start + width] for start in range(0, len(hashes), width))
