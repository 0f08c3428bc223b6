"""Tile configurations of the attention kernels.

A table is searched by (architecture, head_dim, group, dtype, cache dtype), where the group is the number of query
heads per KV head; the first matching entry is used. There is no autotuning at run time.

The entries were chosen by the compiler's report, not yet by measurement. For compute capabilities 8.0 and 9.0 they
fit into shared memory and, in 16-bit types, into registers, except that the large prefill tile of 9.0 spills 16 bytes
per thread if there is a window. If the group is no power of two, it spills up to 88 bytes on 8.0, and 40 on 9.0.
Compiled by Triton 3.6 and 3.7, one more variant of each capability spills up to 40 bytes, and three of 8.0 spill 48.
For 10.0 chunks of an 8-bit cache spill up to 64.
"""

from typing import NamedTuple

import torch
import triton

# Whether kernels run in Triton's interpreter, on a CPU. Its products of bfloat16 operands are wrong, so operands are
# converted to float32 first; results are the same, since accumulation is in float32 anyway.
INTERPRETED = bool(triton.knobs.runtime.interpret)

INTERPRETER, HOPPER = (0, 0), (9, 0)


class TileConfig(NamedTuple):
    """Tile of one program.

    Attributes:
        num_rows: (query, head) pairs; find_tile raises it to the group if that is larger.
        num_keys: keys and values per iteration.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


# (compute capability, head_dim padded to a power of two, group padded to a power of two, bytes per number of
# the queries and of the cache); None: any
TileKey = tuple[tuple[int, int] | None, int | None, int | None, int | None, int | None]

# Least number of rows that tl.dot accepts.
MIN_ROWS = 16

DECODE_TILES: dict[TileKey, TileConfig] = {
    (INTERPRETER, None, None, None, None): TileConfig(MIN_ROWS, 32, 1, 1),
    (None, 512, None, 4, None): TileConfig(MIN_ROWS, 32, 8, 1),
    (None, None, None, 4, None): TileConfig(MIN_ROWS, 32, 4, 2),
    (None, 512, None, None, None): TileConfig(MIN_ROWS, 32, 8, 5),
    (None, 256, None, None, None): TileConfig(MIN_ROWS, 32, 4, 3),
    # The address of a key comes from the block table, so a tile's loads have two stages before them: with 3 stages
    # keys and values have one buffer each, with 5 two, which hide the latency of the next tile.
    ((9, 0), None, None, None, None): TileConfig(MIN_ROWS, 64, 4, 5),
    ((10, 0), None, None, None, None): TileConfig(MIN_ROWS, 64, 4, 5),
    (None, None, None, None, None): TileConfig(MIN_ROWS, 64, 4, 3),
}

# Of decodes with several tokens of a sequence, whose drafts are verified: most rows, and most bytes of their queries,
# beside which the copies of keys and values fit into shared memory.
MAX_RUN_TILE_ROWS = 64
MAX_RUN_TILE_BYTES = 32 << 10

# Chunks of prompts.
LARGE_PREFILL_TILES: dict[TileKey, TileConfig] = {
    (INTERPRETER, None, None, None, None): TileConfig(64, 32, 1, 1),
    (None, 512, None, 4, None): TileConfig(MIN_ROWS, 16, 4, 1),
    (None, 512, None, None, None): TileConfig(32, 32, 8, 3),
    (None, 256, None, 4, None): TileConfig(32, 32, 8, 1),
    (None, None, None, 4, None): TileConfig(64, 32, 8, 2),
    ((9, 0), 256, None, None, None): TileConfig(128, 32, 8, 2),
    # 8-bit numbers are converted in registers, so longer tiles spill. With 5 stages there are two buffers.
    ((9, 0), None, None, None, 1): TileConfig(128, 64, 8, 5),
    ((9, 0), None, None, None, None): TileConfig(128, 128, 8, 3),
    (None, 256, None, None, 1): TileConfig(64, 32, 8, 1),
    (None, 256, None, None, None): TileConfig(64, 32, 8, 2),
    (None, None, None, None, 1): TileConfig(128, 32, 8, 2),
    (None, None, None, None, None): TileConfig(128, 64, 8, 2),
}

# A few tokens per sequence: the end of a prompt after a prefix hit, or the new tokens of a draft model.
SMALL_PREFILL_TILES: dict[TileKey, TileConfig] = {
    (INTERPRETER, None, None, None, None): TileConfig(MIN_ROWS, 32, 1, 1),
    (None, 512, None, 4, None): TileConfig(MIN_ROWS, 16, 4, 1),
    (None, 512, None, None, None): TileConfig(32, 32, 8, 3),
    (None, None, None, 4, None): TileConfig(MIN_ROWS, 32, 4, 2),
    (None, 256, None, None, None): TileConfig(MIN_ROWS, 32, 4, 3),
    (None, None, None, None, None): TileConfig(32, 64, 4, 3),
}


def find_architecture(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or INTERPRETER."""
    return INTERPRETER if INTERPRETED else torch.cuda.get_device_capability(device)


def find_tile(table: dict[TileKey, TileConfig], q: torch.Tensor, kv_cache: torch.Tensor) -> TileConfig:
    """Return the entry for queries [T, Hq, D] and a cache [N, 2, Hkv, B, D], with room for the whole group."""
    num_heads, num_kv_heads, head_dim = q.shape[1], kv_cache.shape[2], q.shape[2]
    architecture = find_architecture(q.device)
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    actual = architecture, triton.next_power_of_2(head_dim), group, q.dtype.itemsize, kv_cache.dtype.itemsize
    tile = next(
        tile
        for key, tile in table.items()
        if all(part is None or part == value for part, value in zip(key, actual, strict=True))
    )
    return tile._replace(num_rows=max(tile.num_rows, group))


def find_run_tile(
    table: dict[TileKey, TileConfig], q: torch.Tensor, kv_cache: torch.Tensor, max_queries: int
) -> TileConfig:
    """Return find_tile's entry for decodes, with room for `max_queries` tokens of a sequence or as many as fit."""
    tile = find_tile(table, q, kv_cache)
    most = MAX_RUN_TILE_BYTES // (triton.next_power_of_2(q.shape[2]) * q.dtype.itemsize)
    num_wanted = triton.next_power_of_2(q.shape[1] // kv_cache.shape[2] * max_queries)
    num_rows = min(num_wanted, MAX_RUN_TILE_ROWS, most)
    if max_queries == 1 or num_rows <= tile.num_rows:
        return tile
    # With 4 warps 64 rows spill up to 168 bytes per thread, and 32 rows up to 64 if the cache has 8 bits per number.
    needs_more = num_rows > 32 or kv_cache.dtype.itemsize == 1
    return tile._replace(num_rows=num_rows, num_warps=8 if needs_more else tile.num_warps)


# (compute capability, numbers of a key without the rotated ones padded to a power of two, bytes per number of the
# queries and of the cache); None: any
LatentTileKey = tuple[tuple[int, int] | None, int | None, int | None, int | None]

# Latent attention, absorbed: rows are heads of one token, and a tile of latents has 576 numbers per key.
LATENT_DECODE_TILES: dict[LatentTileKey, TileConfig] = {
    (INTERPRETER, None, None, None): TileConfig(MIN_ROWS, 32, 1, 1),
    (None, None, 4, None): TileConfig(MIN_ROWS, 16, 8, 1),
    # 8-bit latents are converted in registers: with 4 warps up to 80 bytes per thread spill.
    ((9, 0), None, None, 1): TileConfig(MIN_ROWS, 32, 8, 3),
    ((10, 0), None, None, 1): TileConfig(MIN_ROWS, 32, 8, 3),
    ((9, 0), None, None, None): TileConfig(MIN_ROWS, 32, 4, 3),
    ((10, 0), None, None, None): TileConfig(MIN_ROWS, 32, 4, 3),
    (None, None, None, None): TileConfig(MIN_ROWS, 32, 4, 2),
}

# Latent attention, expanded: rows are queries of one head.
LATENT_PREFILL_TILES: dict[LatentTileKey, TileConfig] = {
    (INTERPRETER, None, None, None): TileConfig(MIN_ROWS, 32, 1, 1),
    (None, 256, 4, None): TileConfig(MIN_ROWS, 32, 8, 1),
    (None, None, 4, None): TileConfig(32, 32, 8, 1),
    ((8, 0), 256, None, None): TileConfig(64, 32, 8, 1),
    (None, 256, None, None): TileConfig(64, 64, 8, 2),
    (None, None, None, None): TileConfig(128, 64, 8, 2),
}


def find_latent_tile(
    table: dict[LatentTileKey, TileConfig], dim: int, q: torch.Tensor, latents: torch.Tensor
) -> TileConfig:
    """Return the entry for queries [T, Hq, D] and a cache of latents.

    Args:
        dim: numbers of a key that are multiplied besides the rotated ones: of a latent, or of a head if expanded.
    """
    architecture = find_architecture(q.device)
    actual = architecture, triton.next_power_of_2(dim), q.dtype.itemsize, latents.dtype.itemsize
    return next(
        tile
        for key, tile in table.items()
        if all(part is None or part == value for part, value in zip(key, actual, strict=True))
    )
