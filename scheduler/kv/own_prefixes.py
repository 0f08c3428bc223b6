"""OwnPrefixes: how much of a cached prefix a tenant may be told of."""

from __future__ import annotations

from collections import OrderedDict

from ..sequences.sequence import Sequence

# Blocks remembered, of all tenants that share prefixes: about 16 MB.
MAX_BLOCKS = 131_072


class OwnPrefixes:
    """Blocks that tenants of shared pools have sent or received, the latest ones.

    In a pool, a hit may come from another tenant's request. The number of cached tokens that is reported counts only
    blocks of the tenant's own earlier requests, so that it does not tell what others sent.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # (tenant, digest), the latest last

    def add(self, sequence: Sequence) -> None:
        """Add all full blocks of a sequence, which ends."""
        if not sequence.prefix_pool:
            return
        for digest in sequence.block_digests:
            self._known[sequence.tenant, digest] = None
            self._known.move_to_end((sequence.tenant, digest))
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def num_tokens(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """Return how many of a sequence's cached tokens are reported to its tenant."""
        if not sequence.prefix_pool:
            return num_cached_tokens
        num_own = 0
        for digest in sequence.block_digests[: num_cached_tokens // self._block_size]:
            if (sequence.tenant, digest) not in self._known:
                break
            num_own += 1
        return num_own * self._block_size
