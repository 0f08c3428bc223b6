"""Digests that name content: the blocks of a prompt's prefix, and what determines a request's tokens.

Each full block has a digest chained over all tokens before it, so equal digests mean equal prefixes; SHA-256 keeps
a tenant from constructing a collision with another's prompt. A chain begins at a root made of the model, the tenant
or the pool of tenants that share prefixes, the salt and the adapter. A block that an image touches has the image's
name in its digest. Different roots share nothing, so neither a
hit nor its time tells one tenant what another one sent. Schedulers and gateways hash alike, so a gateway knows
which replica holds a prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np

from .block_tables import IntArray
from .lora import LoraReference
from .media import MediaItem
from .sampling import SamplingParams

# Bytes of the digest of a block, and of a chain's root.
DIGEST_BYTES = 32
# Bytes of a block's digest in a CacheReport: enough to route by, too few to share a block by.
CACHE_HASH_BYTES = 8


def make_root(model: str, salt: bytes = b"", adapter: str = "", *, tenant: str = "", pool: str = "") -> bytes:
    """Return the start of the digest chains of one model, salt, adapter, and tenant or pool.

    Args:
        pool: the tenants that share prefixes with each other; empty for `tenant` alone.
    """
    sharers = (b"pool", pool.encode()) if pool else (b"tenant", tenant.encode())
    parts = (model.encode(), salt, adapter.encode(), *sharers)
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def whole_prompt_salt(salt: bytes, token_ids: Sequence[int] | IntArray, media: Sequence[MediaItem]) -> bytes:
    """Return a salt that only equal prompts share, for a model whose prompts attend to all of their tokens."""
    digest = sha256(len(salt).to_bytes(4, "little") + salt + np.asarray(token_ids, "<i4").tobytes())
    for item in media:
        digest.update(item.start.to_bytes(8, "little") + item.digest)
    return digest.digest()


def prefix_hashes(
    token_ids: Sequence[int] | IntArray, block_size: int, root: bytes, media: Sequence[MediaItem] = ()
) -> list[bytes]:
    """Return the hash of each full block of a prompt, in order, as replicas report it in a CacheReport."""
    raw, width = np.asarray(token_ids, "<i4").tobytes(), 4 * block_size
    digest, hashes = root, []
    for index, start in enumerate(range(0, len(raw) - width + 1, width)):
        parent = parent_with_media(digest, media, index, block_size)
        digest = child_digest(parent, raw[start : start + width])
        hashes.append(digest[:CACHE_HASH_BYTES])
    return hashes


def media_of_block(media: Sequence[MediaItem], index: int, block_size: int) -> list[MediaItem]:
    """Return the images that touch block number `index`."""
    start, end = index * block_size, (index + 1) * block_size
    return [item for item in media if item.start < end and item.end > start]


def parent_with_media(parent: bytes, media: Sequence[MediaItem], index: int, block_size: int) -> bytes:
    """Return the digest that block number `index` continues: the chain before it and the images that it touches.

    Image tokens are equal in all images, so a block with some has the name and the place of each image in its digest.
    """
    touching = media_of_block(media, index, block_size)
    if not touching:
        return parent
    parts = (
        item.digest + (item.start - index * block_size).to_bytes(8, "little", signed=True)
        for item in touching
    )
    return sha256(b"media" + parent + b"".join(parts)).digest()


def child_digest(parent: bytes, tokens: bytes | memoryview) -> bytes:
    """Return the digest of a block of int32 tokens after the chain `parent`."""
    return sha256(parent + tokens).digest()


def chain_digests(contents: list[bytes]) -> list[bytes]:
    """Return the digest of each block, whose content is its chain's digest before it followed by its tokens."""
    return [sha256(content).digest() for content in contents]


def content_digest(
    prompt: IntArray, sampling: SamplingParams, lora: LoraReference | None, media: Sequence[MediaItem] = ()
) -> bytes:
    """Return a digest of what determines a request's tokens, beside the seed; equal for each of its outputs."""
    settings = replace(sampling, n=1, best_of=None, seed=None)
    adapter = "" if lora is None else lora.identity
    digest = hashlib.blake2b(repr((settings, adapter)).encode(errors="surrogatepass"), digest_size=16)
    digest.update(np.ascontiguousarray(prompt, dtype="<i4").tobytes())
    for item in media:
        digest.update(item.start.to_bytes(8, "little") + item.digest)
    return digest.digest()
