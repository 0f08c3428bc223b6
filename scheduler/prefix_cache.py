"""PrefixCache: finds the blocks that already hold the KV of a prompt's beginning.

Each full block has a digest chained over all tokens before it, so equal digests mean equal prefixes; SHA-256
keeps a tenant from constructing a collision with another's prompt.
"""

from __future__ import annotations

from array import array
from hashlib import sha256


class PrefixCache:
    """digest |-> block. Holds no reference: a hit is a reference that the caller takes.

    Args:
        block_size: tokens a block.
        root: what the chains start from; different models or tenants have different roots and share nothing.
    """

    def __init__(self, block_size: int, root: bytes) -> None:
        self._block_bytes = 4 * block_size
        self._root = sha256(root).digest()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def extend(self, digests: list[bytes], token_ids: array[int], num_blocks: int) -> None:
        """Appends to a chain the digests it lacks of the first `num_blocks` full blocks of `token_ids`."""
        if len(digests) >= num_blocks:
            return
        raw = memoryview(token_ids).cast("B")
        parent = digests[-1] if digests else self._root
        for start in range(
            len(digests) * self._block_bytes, num_blocks * self._block_bytes, self._block_bytes
        ):
            parent = self.child(parent, raw[start : start + self._block_bytes])
            digests.append(parent)

    def child(self, parent: bytes | None, tokens: bytes | memoryview) -> bytes:
        """The digest of a block of int32 tokens after the chain `parent`; None: the first block."""
        digest = sha256(parent or self._root)
        digest.update(tokens)
        return digest.digest()

    def match(self, digests: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain."""
        blocks: list[int] = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Makes a block findable; False where another block with the same content is already."""
        if digest in self._block_of:
            return False
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return True

    def forget(self, block_id: int) -> None:
        """The block's content is given up."""
        del self._block_of[self._digest_of.pop(block_id)]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the two maps are each other's inverse."""
        inverse = {block_id: digest for digest, block_id in self._block_of.items()}
        assert inverse == self._digest_of, "the prefix cache's maps disagree"
