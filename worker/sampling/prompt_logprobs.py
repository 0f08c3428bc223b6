"""Scoring prompts: the log-probabilities of their tokens, taken as chunk after chunk is computed."""

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

# Logits of one rank that are held at once: a chunk of a long prompt would have gigabytes of them.
SLICE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of prompts whose logits a step computes.

    Attributes:
        rows: [n] int32, those of a row together.
        positions: [n] int32, places in the prompt, ascending.
        sources: [n] int64, where among the step's tokens the ones before them are.
        num_top: the most likeliest tokens that any row asked for.
    """

    rows: IntArray
    positions: IntArray
    sources: IntArray
    num_top: int


def find_scored(
    scoring: list[PromptScoring | None], rows: IntArray, starts: IntArray, lens: IntArray, sources: IntArray
) -> ScoredTokens | None:
    """The tokens that can be scored in a step; None if there are none.

    Args:
        scoring: [R], what each row asks for.
        rows: [C] rows that compute a chunk.
        starts: [C], the first position of each chunk.
        lens: [C], its length.
        sources: [C], where among the step's tokens it begins.
    """
    parts = []
    num_top = 0
    for row, start, length, source in zip(
        *map(np.ndarray.tolist, (rows, starts, lens, sources)), strict=True
    ):
        asked = scoring[row]
        if asked is None:
            continue
        # The logits at one position are about the token at the next.
        positions = np.arange(max(start + 1, asked.start), min(start + length + 1, asked.end), dtype=np.int32)
        parts.append((np.full_like(positions, row), positions, positions - 1 - start + source))
        num_top = max(num_top, asked.num_top)
    if not any(positions.size for _, positions, _ in parts):
        return None
    all_rows, positions, indices = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ScoredTokens(all_rows, positions, indices, num_top)


def score(
    scored: ScoredTokens,
    hidden: Tensor,
    token_ids: Tensor,
    head: Callable[[Tensor], Tensor],
    sampler: Sampler,
) -> PromptLogprobs:
    """Their log-probabilities; every rank calls it.

    Args:
        hidden: [T, E], the step's tokens after the last norm.
        token_ids: [R, L] int32, the tokens of all rows.
        head: [n, E] |-> this rank's logits, [n, padded part of the vocabulary] float32.
    """
    device = hidden.device
    rows = to_device(scored.rows, device, torch.int64)
    positions = to_device(scored.positions, device, torch.int64)
    sources = to_device(scored.sources, device, torch.int64)
    slice_len = max(1, SLICE_BYTES // (4 * sampler.num_logits))
    parts = [
        sampler.logprobs(
            head(hidden[sources[start : start + slice_len]]),
            token_ids[rows[start : start + slice_len], positions[start : start + slice_len]],
            scored.num_top,
        )
        for start in range(0, len(scored.rows), slice_len)
    ]
    chosen, top_ids, top = (torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True))
    return PromptLogprobs(
        scored.rows, Logprobs(scored.positions, chosen.numpy(), top_ids.int().numpy(), top.numpy())
    )
