"""Batch: the inputs of one step, gathered from the rows that compute in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..kernels.decode_splits import split_decodes
from ..proto.block_tables import IntArray
from ..proto.step import StepPlan
from .attention import AttentionInputs
from .device_rows import DeviceRows
from .memory.host_to_device import to_device_together
from .sampling.prompt_logprobs import ScoredTokens, select_scored_tokens

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens: first those of decoding rows, then the chunks, each row's together.

    Attributes:
        rows: [S] int32, the rows in that order.
        lens: [S] int32, how far each is computed after the step.
        token_ids: [T] int32.
        positions: [T] int64.
        sampled_rows: [N] int32 ascending, rows whose last known token is in the step.
        sampled_index: [N] int64, where their last tokens are among the T; None: they are all of those, in order.
        scored: tokens of prompts whose log-probabilities are asked for.
    """

    rows: IntArray
    lens: IntArray
    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sampled_rows: IntArray
    sampled_index: Tensor | None
    scored: ScoredTokens | None


def gather_batch(
    rows: DeviceRows, plan: StepPlan, block_size: int, fixed_item_len: int | None = None
) -> Batch | None:
    """The step's inputs; None if no row computes.

    Args:
        fixed_item_len: as for split_decodes.

    Raises:
        ValueError: the plan asks a row for tokens or blocks that it does not have; names the row.
    """
    decode_rows = _decoding_rows(rows, plan)
    row_ids = np.concatenate((decode_rows, plan.chunk_rows))
    if row_ids.size == 0:
        return None
    query_lens = np.concatenate((np.ones_like(decode_rows), plan.chunk_lens))
    seq_lens = rows.num_computed[row_ids] + query_lens
    _check(rows, row_ids, query_lens, seq_lens, block_size)

    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
    token_rows = np.repeat(row_ids, query_lens)
    completes = np.flatnonzero(seq_lens == rows.lens[row_ids])
    completes = completes[np.argsort(row_ids[completes])]
    are_all_sampled = plan.chunk_rows.size == 0 and completes.size == decode_rows.size
    arrays = [
        token_rows.astype(np.int64),
        positions,
        _slots_of(rows, token_rows, positions, block_size),
        row_ids,
        np.concatenate(([0], np.cumsum(plan.chunk_lens))).astype(np.int32),
        seq_lens,
        *([] if are_all_sampled else [ends[completes] - 1]),
    ]
    tables, num_decodes = rows.device_tables.ids, decode_rows.size
    device_rows, device_positions, slots, row_index, chunk_starts, device_lens, *sampled_index = (
        to_device_together(arrays, tables.device)
    )
    width = -(-int(seq_lens.max()) // block_size)
    splits = None
    if num_decodes and tables.is_cuda:
        splits = split_decodes(device_lens[:num_decodes], width * block_size, fixed_item_len)
    return Batch(
        rows=row_ids,
        lens=seq_lens,
        token_ids=rows.token_ids[device_rows, device_positions],
        positions=device_positions,
        attention=AttentionInputs(
            num_decodes=num_decodes,
            slot_mapping=slots,
            block_tables=tables[:, :width].index_select(0, row_index),
            query_start=chunk_starts,
            seq_lens=device_lens,
            splits=splits,
        ),
        sampled_rows=row_ids[completes],
        sampled_index=sampled_index[0] if sampled_index else None,
        scored=_scored(rows, plan, (seq_lens - query_lens)[num_decodes:], (ends - query_lens)[num_decodes:]),
    )


def _slots_of(rows: DeviceRows, token_rows: IntArray, positions: LongArray, block_size: int) -> LongArray:
    """The slot of each token, ``block_id * B + offset``, [T] int64."""
    index, offsets = np.divmod(positions, block_size)
    return rows.tables.ids[token_rows, index].astype(np.int64) * block_size + offsets


def _scored(rows: DeviceRows, plan: StepPlan, starts: IntArray, sources: IntArray) -> ScoredTokens | None:
    """Tokens of prompts whose log-probabilities are asked for.

    Args:
        starts: [C] where each chunk begins in its prompt.
        sources: [C] where it begins among the step's tokens.
    """
    if not rows.sampling.scores[plan.chunk_rows].any():
        return None
    return select_scored_tokens(rows.sampling.scoring, plan.chunk_rows, starts, plan.chunk_lens, sources)


def _decoding_rows(rows: DeviceRows, plan: StepPlan) -> IntArray:
    if plan.held_rows.size == 0:
        return np.flatnonzero(rows.decoding).astype(np.int32)
    runs = rows.decoding.copy()
    runs[plan.held_rows] = False
    return np.flatnonzero(runs).astype(np.int32)


def _check(
    rows: DeviceRows, row_ids: IntArray, query_lens: IntArray, seq_lens: IntArray, block_size: int
) -> None:
    """Numbers out of range would read and write other sequences' blocks in silence."""
    _refuse(row_ids, query_lens < 1, "an empty chunk")
    _refuse(row_ids, seq_lens > np.minimum(rows.lens[row_ids], rows.max_len), "tokens that it does not have")
    _refuse(row_ids, seq_lens > rows.tables.lens[row_ids] * block_size, "slots beyond its blocks")


def _refuse(row_ids: IntArray, wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        raise ValueError(f"the plan asks row {row_ids[wrong][0]} for {what}")
