"""Warming: a replica that has become ready reads the prefixes that prompts share from those that have them.

It takes requests meanwhile, and reads in small pieces with pauses as long as the reads, so that the blocks of a
request that moves wait for one piece at most. It reads into memory that nothing has used yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ....proto.kv_transfer import PULL_OVERHEAD_S, KvOffer
from ....proto.replica_status import ReplicaStatus
from ...fleet.routing.hot_prefixes import HotPrefix
from ...fleet.routing.prefill_split import PullRate
from ...text.requests.request import Request

# Share of the replica's blocks up to which prefixes are read, and the time for all of them.
MAX_USE = 0.5
MAX_S = 30.0
# A piece is what takes this long at the measured rate.
PIECE_S = 0.25
LEND_TIMEOUT_S = 1.0


class Lender(Protocol):
    """See ReplicaClient."""

    async def lend(self, request: Request, timeout_s: float) -> KvOffer | None: ...


class Target(Protocol):
    """See ReplicaClient."""

    @property
    def latest_status(self) -> ReplicaStatus | None: ...
    @property
    def problem(self) -> str: ...
    def fetch(self, request: Request, handle: int | None = None) -> int: ...


async def warm(
    target: Target,
    prefixes: Sequence[HotPrefix],
    block_size: int,
    num_cached_blocks: Callable[[Sequence[bytes]], int],
    find_lender: Callable[[Sequence[bytes]], Lender | None],
    clock: Callable[[], float],
) -> AsyncIterator[int]:
    """Have a replica read prefixes; yield the tokens of each piece that was ordered.

    Args:
        prefixes: the hottest first.
        num_cached_blocks: returns how many blocks of a prefix the replica has already.
        find_lender: returns a replica that has all blocks of a prefix; None if there is none.
        clock: monotonic time in seconds.
    """
    deadline, num_left = clock() + MAX_S, None
    for prefix in prefixes:
        num_read, handle = num_cached_blocks(prefix.hashes), None
        while num_read < len(prefix.hashes):
            status = target.latest_status
            if status is None or not status.kv_layout or target.problem or clock() >= deadline:
                return
            if num_left is None:
                num_left = (
                    int(MAX_USE * status.num_blocks) - status.num_used_blocks - status.num_cached_blocks
                )
            blocks_per_s = status.kv_pull_bytes_per_s / (status.kv_token_bytes * block_size)
            end = min(len(prefix.hashes), num_read + max(1, int(PIECE_S * blocks_per_s)))
            lender = find_lender(prefix.hashes[:end])
            offer = (
                None if lender is None else await lender.lend(prefix.first(end, block_size), LEND_TIMEOUT_S)
            )
            if offer is None or offer.layout != status.kv_layout or offer.num_blocks <= num_read:
                break
            num_left -= sum(1 for block_id in offer.block_ids.tolist() if block_id) * (end - num_read) // end
            if num_left < 0:
                return
            handle = target.fetch(replace(prefix.request, kv=offer, fetch_only=True), handle)
            num_new, num_read = offer.num_blocks - num_read, offer.num_blocks
            yield num_new * block_size
            state_s = PullRate.of(status).state_s if offer.state_slot else 0.0
            await asyncio.sleep(2 * (PULL_OVERHEAD_S + num_new / max(blocks_per_s, 1e-9) + state_s))
