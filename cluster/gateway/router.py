"""Router: which replica gets a request. A pure data structure: no clock, no network, and its chance is injected."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ...proto.stream import CACHE_HASH_BYTES, CacheReport

# Hashes kept a replica, the latest ones: about 12 MB. A block of 16 tokens each, that is two million tokens.
MAX_HASHES = 131_072
# What one replica may have queued more than the idlest before that counts: about one step's tokens.
QUEUE_SLACK_TOKENS = 2048
# How much more of its KV memory a replica may have in use than the emptiest before a cached prefix is left behind.
KV_SLACK = 0.2


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy a replica is.

    Attributes:
        queued_tokens: prompt tokens that it has been sent and not computed.
        kv_use: share of its KV blocks that running sequences hold, 0 to 1.
    """

    queued_tokens: int
    kv_use: float


class Router:
    """Prefers the replica whose cache holds the longest beginning of a request, unless that is overloaded.

    Overloaded is who has so much more to do than the idlest that the wait would outlast the computation saved. Among
    equals, and where everybody who knows the prefix is overloaded, the less loaded of two random replicas is taken
    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001): loads are a second old, and with
    the minimum of all every gateway would pile on the same replica.

    A request that nobody knows the beginning of goes where its salt belongs, by rendezvous hashing (Thaler and
    Ravishankar, 1998): a tenant's requests share with no other tenant's, so they had better meet.

    Args:
        block_size: tokens a KV block.
        rng: where the random choices come from.
        max_hashes: kept a replica.
    """

    def __init__(
        self, block_size: int, rng: random.Random | None = None, max_hashes: int = MAX_HASHES
    ) -> None:
        self._block_size = block_size
        self._rng = random.Random() if rng is None else rng
        self._max_hashes = max_hashes
        self._caches: dict[str, dict[bytes, None]] = {}  # replica_id |-> hashes, the latest last

    def choose(self, hashes: Sequence[bytes], salt: bytes, replicas: Mapping[str, ReplicaLoad]) -> str:
        """The replica that should run a request.

        Args:
            hashes: of the request's full blocks, in order; see `prefix_cache.prefix_hashes`.
            salt: the request's; empty: it is nobody's in particular.
            replicas: replica_id |-> load, of those that take requests; at least one.
        """
        matches = {replica_id: self.match(replica_id, hashes) for replica_id in replicas}
        longest = max(matches.values())
        if longest:
            preferred = [replica_id for replica_id in replicas if matches[replica_id] == longest]
        elif salt:
            preferred = [max(replicas, key=lambda replica_id: _affinity(salt, replica_id))]
        else:
            preferred = list(replicas)
        fit = _without_overloaded(preferred, replicas, longest * self._block_size)
        return self._idler_of_two(fit or list(replicas), replicas)

    def match(self, replica_id: str, hashes: Iterable[bytes]) -> int:
        """How many blocks of a beginning the replica holds, or soon will."""
        cache = self._caches.get(replica_id)
        if not cache:
            return 0
        num_blocks = 0
        for name in hashes:
            if name not in cache:
                break
            num_blocks += 1
        return num_blocks

    def note_submit(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """A request was sent: its beginning counts as cached there from now on.

        Should it never be computed there, the next request with that beginning puts that right.
        """
        self._add(replica_id, hashes)

    def update(self, replica_id: str, report: CacheReport) -> None:
        """What the replica says of its cache: a change since the last report, or the whole where `since` is 0."""
        if report.since == 0:
            self._caches.pop(replica_id, None)
        cache = self._caches.get(replica_id, {})
        for name in _split(report.removed):
            cache.pop(name, None)
        self._add(replica_id, _split(report.added))

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._caches.pop(replica_id, None)

    def _add(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        cache = self._caches.setdefault(replica_id, {})
        for name in hashes:
            cache.pop(name, None)
            cache[name] = None
        while len(cache) > self._max_hashes:
            del cache[next(iter(cache))]

    def _idler_of_two(self, candidates: Sequence[str], replicas: Mapping[str, ReplicaLoad]) -> str:
        pair = self._rng.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda replica_id: _pressure(replicas[replica_id]))


def _without_overloaded(
    candidates: Iterable[str], replicas: Mapping[str, ReplicaLoad], saved_tokens: int
) -> list[str]:
    """Those of the candidates at which a request that saves so many tokens would not wait longer than it saves."""
    max_queued = min(load.queued_tokens for load in replicas.values()) + max(saved_tokens, QUEUE_SLACK_TOKENS)
    max_kv_use = min(load.kv_use for load in replicas.values()) + KV_SLACK
    return [
        replica_id
        for replica_id in candidates
        if replicas[replica_id].queued_tokens <= max_queued and replicas[replica_id].kv_use <= max_kv_use
    ]


def _pressure(load: ReplicaLoad) -> tuple[int, float]:
    """What makes one replica busier than another: its queue first, in steps; then its memory."""
    return load.queued_tokens // QUEUE_SLACK_TOKENS, load.kv_use


def _affinity(salt: bytes, replica_id: str) -> bytes:
    return blake2b(salt + b"\0" + replica_id.encode(), digest_size=8).digest()


def _split(hashes: bytes) -> Iterable[bytes]:
    width = CACHE_HASH_BYTES
    return (hashes[start : start + width] for start in range(0, len(hashes), width))
