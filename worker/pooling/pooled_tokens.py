"""PooledTokens: the hidden states that a step contributes to the vectors of pooled rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.pooling import PoolingParams


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Chunks of pooled rows in a step.

    Attributes:
        rows: [C] int32.
        starts: [C], position of each chunk's first token in its prompt.
        lens: [C], tokens of each chunk.
        sources: [C], index of each chunk's first token among the step's T tokens.
        is_last: [C] bool, the chunk ends its prompt.
        params: of each chunk's row.
    """

    rows: IntArray
    starts: IntArray
    lens: IntArray
    sources: IntArray
    is_last: np.ndarray
    params: tuple[PoolingParams, ...]


def select_pooled_tokens(
    pooling: list[PoolingParams | None],
    rows: IntArray,
    starts: IntArray,
    lens: IntArray,
    sources: IntArray,
    prompt_lens: IntArray,
) -> PooledTokens | None:
    """Return the chunks of pooled rows. Returns None if there are none.

    Args:
        pooling: [R], the params of each row; None for rows that generate.
        rows: [C] rows that compute a chunk.
        starts, lens, sources: [C], as in PooledTokens.
        prompt_lens: [C], tokens of each row.
    """
    chunks = [index for index, row in enumerate(rows.tolist()) if pooling[row] is not None]
    if not chunks:
        return None
    chunks.sort(key=lambda index: int(rows[index]))
    params = (pooling[int(row)] for row in rows[chunks])
    return PooledTokens(
        rows[chunks],
        starts[chunks],
        lens[chunks],
        sources[chunks],
        (starts + lens >= prompt_lens)[chunks],
        tuple(each for each in params if each is not None),
    )
