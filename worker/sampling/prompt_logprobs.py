"""Log-probabilities of prompt tokens, computed chunk by chunk with the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.step import Logprobs, PromptLogprobs, PromptScoring
from ..memory.host_to_device import to_device
from .sampler import Sampler

# Bytes of one rank's logits that are held at once: those of a whole long chunk would take gigabytes.
SLICE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens whose log-probabilities a step computes.

    Attributes:
        rows: [n] int32; the tokens of a row are adjacent.
        positions: [n] int32, in the prompt, ascending within a row.
        sources: [n] int64, index among the step's T tokens of the token before each.
        num_top: the largest number of most likely tokens that any row reports.
    """

    rows: IntArray
    positions: IntArray
    sources: IntArray
    num_top: int


def select_scored_tokens(
    scoring: list[PromptScoring | None], rows: IntArray, starts: IntArray, lens: IntArray, sources: IntArray
) -> ScoredTokens | None:
    """Return the prompt tokens to score in a step. Returns None if there are none.

    Args:
        scoring: [R], the request of each row.
        rows: [C] rows that compute a chunk.
        starts: [C], the first position of each chunk.
        lens: [C], tokens of each chunk.
        sources: [C], index of each chunk's first token among the step's T tokens.
    """
    parts = []
    num_top = 0
    for row, start, length, source in zip(
        *map(np.ndarray.tolist, (rows, starts, lens, sources)), strict=True
    ):
        requested = scoring[row]
        if requested is None:
            continue
        # The logits at one position predict the token at the next.
        first, end = max(start + 1, requested.start), min(start + length + 1, requested.end)
        positions = np.arange(first, end, dtype=np.int32)
        parts.append((np.full_like(positions, row), positions, positions - 1 - start + source))
        num_top = max(num_top, requested.num_top)
    if not any(positions.size for _, positions, _ in parts):
        return None
    all_rows, positions, indices = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ScoredTokens(all_rows, positions, indices, num_top)


def compute_prompt_logprobs(
    scored: ScoredTokens,
    hidden: Tensor,
    token_ids: Tensor,
    head: Callable[[Tensor, IntArray], Tensor],
    sampler: Sampler,
) -> PromptLogprobs:
    """Return the log-probabilities of prompt tokens; a collective.

    Args:
        hidden: [T, E], hidden states of the step's tokens after the last norm.
        token_ids: [R, L] int32, the tokens of all rows.
        head: [n, E], and the row of each |-> this rank's logits, [n, padded part of the vocabulary] float32.
    """
    device = hidden.device
    rows = to_device(scored.rows, device, torch.int64)
    positions = to_device(scored.positions, device, torch.int64)
    sources = to_device(scored.sources, device, torch.int64)
    slice_len = max(1, SLICE_BYTES // (4 * sampler.num_logits))
    parts = [
        sampler.logprobs(
            head(hidden[sources[start : start + slice_len]], scored.rows[start : start + slice_len]),
            token_ids[rows[start : start + slice_len], positions[start : start + slice_len]],
            scored.num_top,
        )
        for start in range(0, len(scored.rows), slice_len)
    ]
    chosen, ranks, top_ids, top = (torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True))
    return PromptLogprobs(
        scored.rows, Logprobs(scored.positions, chosen, ranks, top_ids.astype(np.int32), top)
    )
