"""Tile tables: how large a piece each program of the attention kernels works on.

Looked up by (architecture, head_dim, group, dtype, stored dtype) where the group is the number of query heads to a
KV head; the first entry that fits counts. Nothing is tuned while requests wait.

The entries were chosen by what the compiler reports, not yet by measurement: for compute capabilities 8.0 and 9.0
they fit into shared memory and, in 16-bit types, into registers, but for 16 bytes a thread of 9.0's large prefill
tile where there is a window.
"""

from typing import NamedTuple

import torch
import triton

# True where kernels run in Triton's interpreter, on a CPU. There a product of bfloat16 operands is silently wrong,
# so that operands are made float32 first; results are the same, accumulation being in float32 anyway.
INTERPRETED = bool(triton.knobs.runtime.interpret)

INTERPRETER = (0, 0)


class Tile(NamedTuple):
    """One program's piece.

    Attributes:
        num_rows: (query, head) pairs; for decoding at least that many, as the group wants.
        num_keys: keys and values a turn of the loop.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


# (compute capability, head_dim padded to a power of two, group padded to a power of two, bytes a number of the
# queries and of the cache); None: any
TileKey = tuple[tuple[int, int] | None, int | None, int | None, int | None, int | None]

# What tl.dot accepts at least.
MIN_ROWS = 16

DECODE_TILES: dict[TileKey, Tile] = {
    (INTERPRETER, None, None, None, None): Tile(MIN_ROWS, 32, 1, 1),
    (None, None, None, 4, None): Tile(MIN_ROWS, 32, 4, 2),
    (None, 256, None, None, None): Tile(MIN_ROWS, 32, 4, 3),
    (None, None, None, None, None): Tile(MIN_ROWS, 64, 4, 3),
}

# Chunks of prompts.
LARGE_PREFILL_TILES: dict[TileKey, Tile] = {
    (INTERPRETER, None, None, None, None): Tile(64, 32, 1, 1),
    (None, 256, None, 4, None): Tile(32, 32, 8, 1),
    (None, None, None, 4, None): Tile(64, 32, 8, 2),
    ((9, 0), 256, None, None, None): Tile(128, 32, 8, 2),
    # Numbers of a byte are widened in registers, so that longer tiles spill.
    ((9, 0), None, None, None, 1): Tile(128, 64, 8, 3),
    ((9, 0), None, None, None, None): Tile(128, 128, 8, 3),
    (None, 256, None, None, 1): Tile(64, 32, 8, 1),
    (None, 256, None, None, None): Tile(64, 32, 8, 2),
    (None, None, None, None, 1): Tile(128, 32, 8, 2),
    (None, None, None, None, None): Tile(128, 64, 8, 2),
}

# A few tokens a sequence: the last of a prompt after a prefix hit, or drafts to verify.
SMALL_PREFILL_TILES: dict[TileKey, Tile] = {
    (INTERPRETER, None, None, None, None): Tile(MIN_ROWS, 32, 1, 1),
    (None, None, None, 4, None): Tile(MIN_ROWS, 32, 4, 2),
    (None, 256, None, None, None): Tile(MIN_ROWS, 32, 4, 3),
    (None, None, None, None, None): Tile(32, 64, 4, 3),
}


def find_tile(table: dict[TileKey, Tile], q: torch.Tensor, kv_cache: torch.Tensor) -> Tile:
    """The entry for queries [T, Hq, D] and a cache [N, 2, Hkv, B, D], with room for the whole group."""
    num_heads, num_kv_heads, head_dim = q.shape[1], kv_cache.shape[2], q.shape[2]
    architecture = INTERPRETER if INTERPRETED else torch.cuda.get_device_capability(q.device)
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    wanted = architecture, triton.next_power_of_2(head_dim), group, q.dtype.itemsize, kv_cache.dtype.itemsize
    tile = next(
        tile
        for key, tile in table.items()
        if all(part is None or part == own for part, own in zip(key, wanted, strict=True))
    )
    return tile._replace(num_rows=max(tile.num_rows, group))
