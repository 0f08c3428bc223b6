"""Batch: the inputs of one step, gathered from DeviceRows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.decode_inputs import RowTables, gather_decodes
from ...kernels.latent_attention import ChunkBounds
from ...kernels.state_runs import StateRuns
from ...proto.block_tables import IntArray, RowArray
from ...proto.model.parallel_split import own_indices
from ...proto.step import StepPlan
from ..attention import (
    NO_SPANS,
    AttentionInputs,
    GeneratedTokens,
    ImageSpans,
    OwnTokens,
    split_groups,
    with_groups,
)
from ..lora.step_adapters import NO_ADAPTERS, StepAdapters, make_step_adapters
from ..memory.host_to_device import to_device_once, to_device_together
from ..pooling.pooler import PooledTokens, select_pooled_tokens
from ..sampling.prompt_logprobs import ScoredTokens, select_scored_tokens
from .device_rows import DeviceRows
from .media_rows import StepMedia

LongArray = npt.NDArray[np.int64]

# Of a step without chunks on a CPU.
_NO_CHUNKS = torch.zeros(1, dtype=torch.int32)
_NO_CHUNK_BOUNDS = ChunkBounds([], [])


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens: those of decoding rows first, then the chunks; the tokens of a row are adjacent.

    Each drafted token is a sequence of its own for attention: it has its row's block table, and sees the tokens
    before it. A CPU's ops of decode steps compute it with the same bits as a step without drafts would. On a GPU the
    tokens of a row share the reads of its keys (see kernels.decode_splits), and bits may differ.

    Attributes:
        rows: [S] int64, the row of each sequence in this order; a row with drafted tokens repeats.
        lens: [S], computed tokens of each row after the step. They and all positions on the host are without the
            tokens that unsettled steps have accepted; those on the device are with them.
        token_ids: [T] int32.
        positions: [T] int64, the rotary positions of the tokens, or [3, T] if some are within a prompt with images.
        num_decodes: sequences with one token, which come first; with data-parallel attention those of all ranks.
        sampled_rows: [N] int64 ascending, rows whose last known token is in the step; repeated for drafted tokens,
            without pooled rows.
        sampled_positions: [N] int64, of the tokens to sample.
        has_drafts: some rows have drafted tokens.
        sampled_index: [N] int64, indices of their last tokens among the T; None if these are all T tokens in order.
        scored: prompt tokens whose log-probabilities the step computes.
        lora: the adapters of the tokens.
        token_rows, token_positions: [T] int64 on the host, the row and the position of each token.
        row_ids, row_starts, row_lens: [n] on the host, the distinct rows in the order of their tokens, the position
            of each one's first token, and its number of tokens.
        pooled: prompt tokens of pooled rows.
        state_runs: the tokens and the state slot of each sequence; None for models without states.
        media: the image tokens of the step; None if there are none.
    """

    rows: LongArray
    lens: LongArray
    token_ids: Tensor
    positions: Tensor
    num_decodes: int
    attention: AttentionInputs
    sampled_rows: LongArray
    sampled_positions: LongArray
    has_drafts: bool
    sampled_index: Tensor | None
    scored: ScoredTokens | None
    token_rows: LongArray
    token_positions: LongArray
    row_ids: LongArray
    row_starts: IntArray
    row_lens: IntArray
    lora: StepAdapters = NO_ADAPTERS
    pooled: PooledTokens | None = None
    state_runs: StateRuns | None = None
    media: StepMedia | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Order of a step's sequences and tokens, on the host.

    Attributes:
        num_decodes: sequences with one token, which come first.
        rows: [S] int64.
        query_lens, seq_lens: [S] int32.
        ends: [S] int64, the sequences' last tokens among the T, plus one.
        token_rows, positions: [T].
        row_ids, row_starts, row_lens: as in Batch.
        sampled: [N] int64, sequences whose last known token is in the step, by row.
    """

    num_decodes: int
    rows: LongArray
    query_lens: IntArray
    seq_lens: IntArray
    ends: LongArray
    token_rows: LongArray
    positions: LongArray
    row_ids: LongArray
    row_starts: IntArray
    row_lens: IntArray
    sampled: LongArray

    @property
    def first_rows(self) -> IntArray | None:
        """Return the first of the sequences with one token that have each one's row. Returns None if all differ."""
        rows = self.rows[: self.num_decodes]
        is_first = np.ones(rows.size, np.bool_)
        is_first[1:] = rows[1:] != rows[:-1]
        if is_first.all():
            return None
        first_rows: IntArray = np.flatnonzero(is_first).astype(np.int32)[np.cumsum(is_first) - 1]
        return first_rows

    @property
    def samples_all(self) -> bool:
        """Return whether every token of the step is sampled from, in order."""
        return self.sampled.size == self.rows.size == self.num_decodes


class _OwnPart(NamedTuple):
    """The part of a step that this rank attends for, with data-parallel attention.

    Attributes:
        layout: of its sequences alone.
        tokens: indices of their tokens among the T.
    """

    layout: _Layout
    tokens: LongArray


def gather_batch(
    rows: DeviceRows,
    plan: StepPlan,
    block_size: int,
    num_drafted: IntArray | None = None,
) -> Batch | None:
    """Gather the inputs of a step. Returns None if no row computes.

    Args:
        num_drafted: [R], drafted tokens that each row computes after its newest one; None for none.

    Raises:
        ValueError: the plan computes tokens or uses blocks that a row does not have; names the row.
    """
    if rows.row_tables is not None and rows.partition is None and not plan.chunk_rows.size:
        return _gather_decodes(rows, rows.row_tables, decoding_rows(rows, plan), num_drafted)
    layout = _lay_out(rows, plan, num_drafted)
    if layout is None:
        return None
    _check(rows, layout, block_size, num_drafted)
    sampled, chunks = layout.sampled, slice(layout.num_decodes, None)
    starts = (layout.seq_lens - layout.query_lens)[chunks]
    sources = (layout.ends - layout.query_lens)[chunks]
    own = _own_part(rows, layout)
    media, rotary, images = None, None, NO_SPANS
    if rows.media.has_any(layout.row_ids):
        spans = zip(
            *(each.tolist() for each in (plan.chunk_rows, starts, plan.chunk_lens, sources)), strict=True
        )
        own_chunks = list(spans)
        media = rows.media.image_tokens(own_chunks)
        rotary = rows.media.rotary_positions(layout.token_rows, layout.positions, own_chunks)
        images = rows.media.spans(own_chunks, layout.num_decodes, rows.prompt_lens)
    token_ids, positions, sampled_index, attention = _gather_inputs(
        rows, layout, own, block_size, rotary, images
    )
    lora = make_step_adapters(
        rows.lora_slots[layout.token_rows],
        None if layout.samples_all else rows.lora_slots[layout.rows[sampled]],
        positions.device,
        None if own is None else rows.lora_slots[own.layout.token_rows],
        _sent_slots(rows, (layout if own is None else own.layout).token_rows),
    )
    state_runs = _state_runs(
        rows, layout.row_ids, layout.row_starts, layout.row_lens, num_drafted, positions.device
    )
    if state_runs is not None and plan.save_tails.size:
        state_runs = _cut(state_runs, rows, plan, layout.row_ids, layout.row_lens)
    return Batch(
        rows=layout.rows,
        lens=layout.seq_lens.astype(np.int64),
        token_ids=token_ids,
        positions=positions,
        num_decodes=layout.num_decodes,
        attention=attention,
        sampled_rows=layout.rows[sampled],
        sampled_positions=layout.seq_lens[sampled].astype(np.int64),
        has_drafts=num_drafted is not None,
        sampled_index=sampled_index,
        scored=_scored_tokens(rows, plan, starts, sources),
        lora=lora,
        token_rows=layout.token_rows,
        token_positions=layout.positions,
        row_ids=layout.row_ids,
        row_starts=layout.row_starts,
        row_lens=layout.row_lens,
        pooled=_pooled_tokens(rows, plan, starts, sources),
        state_runs=state_runs,
        media=media,
    )


def _gather_decodes(
    rows: DeviceRows, tables: RowTables, row_ids: LongArray, num_drafted: IntArray | None
) -> Batch | None:
    """Gather a step without chunks on a CPU, of a model with one cache group; see `gather_batch`."""
    if not row_ids.size:
        return None
    counts, lens = rows.one_each[: row_ids.size], rows.lens[row_ids]
    ends = lens
    if num_drafted is not None:
        drafted = num_drafted[row_ids]
        counts, ends = counts + drafted, lens + drafted
    _raise_if_any(row_ids, ends > rows.max_len, "more tokens than it has")
    most = rows.tables.lens[row_ids] * tables.block_size
    _raise_if_any(row_ids, ends > most, "more tokens than its blocks hold")
    width = -(-max(ends.tolist()) // tables.block_size)
    inputs = gather_decodes(tables, row_ids, counts, width)
    token_rows, positions = inputs.token_rows, inputs.positions.numpy()
    seq_lens = positions + 1
    rotary = inputs.positions
    if rows.media.has_any(row_ids):
        rotary = rotary + torch.from_numpy(rows.media.shifts[token_rows])
    return Batch(
        rows=token_rows,
        lens=seq_lens,
        token_ids=inputs.token_ids,
        positions=rotary,
        num_decodes=token_rows.size,
        attention=AttentionInputs(
            num_decodes=token_rows.size,
            slot_mapping=inputs.slots,
            block_tables=inputs.block_tables,
            query_start=_NO_CHUNKS,
            seq_lens=inputs.seq_lens,
            chunks=_NO_CHUNK_BOUNDS,
        ),
        sampled_rows=token_rows,
        sampled_positions=seq_lens,
        has_drafts=num_drafted is not None,
        sampled_index=None,
        scored=None,
        token_rows=token_rows,
        token_positions=positions,
        row_ids=row_ids,
        row_starts=lens - 1,
        row_lens=counts,
        lora=make_step_adapters(
            rows.lora_slots[token_rows],
            None,
            inputs.positions.device,
            sent_slots=_sent_slots(rows, token_rows),
        ),
        state_runs=_state_runs(rows, row_ids, lens - 1, counts, num_drafted, inputs.positions.device),
    )


def _state_runs(
    rows: DeviceRows,
    row_ids: LongArray,
    row_starts: IntArray,
    row_lens: IntArray,
    num_drafted: IntArray | None,
    device: torch.device,
) -> StateRuns | None:
    """Return the runs of a step's sequences, [S], each with its drafted tokens; None for a model without states.

    Args:
        row_ids, row_starts, row_lens: as in Batch.
    """
    if not rows.has_states:
        return None
    starts = np.zeros(row_ids.size + 1, np.int32)
    np.cumsum(row_lens, out=starts[1:])
    arrays: list[npt.NDArray[Any]] = [rows.tables.state_slots[row_ids], starts, row_starts == 0]
    # On a GPU all steps have them, so that drafts need no variants of the kernels.
    if num_drafted is not None or device.type != "cpu":
        arrays.append(np.ones(row_ids.size, np.bool_) if num_drafted is None else num_drafted[row_ids] == 0)
    slots, device_starts, is_new, *stores = to_device_together(arrays, device)
    return StateRuns(
        slots,
        device_starts,
        is_new,
        int(row_lens.max()),
        stores[0] if stores else None,
        calls=None if num_drafted is None else [],
    )


def _cut(
    runs: StateRuns, rows: DeviceRows, plan: StepPlan, row_ids: LongArray, row_lens: IntArray
) -> StateRuns:
    """Return the runs with cuts where the plan saves states before the ends of chunks.

    Raises:
        ValueError: a cut is not within a chunk; names the slot.
    """
    inside = plan.save_tails > 0
    (sources, targets), tails = plan.state_saves[inside].T, plan.save_tails[inside]
    slots = rows.tables.state_slots[row_ids]
    order = np.argsort(slots, kind="stable")
    index = order[np.minimum(np.searchsorted(slots, sources, sorter=order), slots.size - 1)]
    is_wrong = (slots[index] != sources) | (row_lens[index] <= tails)
    if is_wrong.any():
        raise ValueError(f"the plan saves a state within no chunk, of slot {sources[is_wrong][0]}")
    in_order = np.argsort(index)
    index, targets, tails = index[in_order], targets[in_order], tails[in_order]
    ends = np.cumsum(row_lens)[index]
    tokens = np.repeat(ends - np.cumsum(tails), tails) + np.arange(tails.sum())
    arrays = [
        index.astype(np.int64),
        (row_lens[index] - tails).astype(np.int32),
        targets.astype(np.int64),
        tokens,
    ]
    cut_runs, lens, slots_to, tail_tokens = to_device_together(arrays, runs.slots.device)
    return runs.cut(cut_runs, lens, slots_to, tail_tokens, int(tails.max()))


def _lay_out(rows: DeviceRows, plan: StepPlan, num_drafted: IntArray | None) -> _Layout | None:
    """Return the order of the step's tokens. Returns None if no row computes."""
    decode_rows = decoding_rows(rows, plan)
    chunk_rows = plan.chunk_rows.astype(np.int64)
    row_ids = np.concatenate((decode_rows, chunk_rows))
    if row_ids.size == 0:
        return None
    counts = rows.one_each[: decode_rows.size]
    if num_drafted is not None:
        counts = counts + num_drafted[decode_rows]
    decodes, offsets = _repeat_for_drafts(decode_rows, counts)
    sequences = np.concatenate((decodes, chunk_rows))
    query_lens = np.concatenate((np.ones(decodes.size, np.int32), plan.chunk_lens))
    seq_lens = rows.num_computed[sequences] + query_lens
    seq_lens[: decodes.size] += offsets
    ends = np.cumsum(query_lens, dtype=np.int64)
    sampled = np.flatnonzero((seq_lens >= rows.lens[sequences]) & ~rows.pools[sequences])
    return _Layout(
        num_decodes=decodes.size,
        rows=sequences,
        query_lens=query_lens,
        seq_lens=seq_lens,
        ends=ends,
        token_rows=np.repeat(sequences, query_lens),
        positions=np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens),
        row_ids=row_ids,
        row_starts=rows.num_computed[row_ids],
        row_lens=np.concatenate((counts, plan.chunk_lens)),
        sampled=sampled[np.argsort(sequences[sampled], kind="stable")],
    )


def _gather_inputs(
    rows: DeviceRows,
    layout: _Layout,
    own_part: _OwnPart | None,
    block_size: int,
    rotary: LongArray | None,
    images: ImageSpans,
) -> tuple[Tensor, Tensor, Tensor | None, AttentionInputs]:
    """Return the token ids, the positions, the sampled tokens and the inputs of attention, on the device.

    Args:
        rotary: rotary positions, if they are not the places of the tokens.
        images: images whose tokens attend to each other.
    """
    own = layout if own_part is None else own_part.layout
    num_decodes, seq_lens, num_groups = own.num_decodes, own.seq_lens, rows.tables.num_groups
    chunk_lens = own.query_lens[num_decodes:]
    token_tables, token_positions = rows.tables.tables_of(own.token_rows), own.positions
    if num_groups > 1:
        token_positions = np.tile(token_positions, num_groups)
    device = rows.device_tables.ids.device
    first_rows = None if device.type == "cpu" else own.first_rows
    accepted = rows.unsettled.accepted
    arrays: list[npt.NDArray[Any]] = [
        layout.token_rows,
        layout.positions,
        compute_slots(rows, token_tables, token_positions, block_size)
        if accepted is None
        else token_tables.astype(np.int64, copy=False),
        rows.tables.tables_of(own.rows).astype(np.int32, copy=False),
        np.concatenate(([0], np.cumsum(chunk_lens))).astype(np.int32),
        seq_lens,
        _first_positions(rows, own),
        *([] if own_part is None else [own_part.tokens]),
        *([] if first_rows is None else [first_rows]),
        *([] if layout.samples_all else [layout.ends[layout.sampled] - 1]),
    ]
    token_rows, positions, slots, table_index, chunk_starts, device_lens, first_positions, *others = (
        to_device_together(arrays, device)
    )
    own_tokens = None if own_part is None else others.pop(0)
    device_first_rows = None if first_rows is None else others.pop(0)
    width = -(-int(seq_lens.max(initial=1)) // block_size)
    rotary_positions = positions if rotary is None else to_device_once(rotary, device)
    if accepted is not None:
        # Slots, and whatever else follows from the positions, are computed on the device.
        gained, seqs_gained = (
            accepted.index_select(0, index) for index in (token_rows, table_index[: len(device_lens)])
        )
        positions, rotary_positions = positions + gained, rotary_positions + gained
        own_positions = positions if own_tokens is None else positions.index_select(0, own_tokens)
        slots = _slots_on_device(rows, slots, own_positions.repeat(num_groups), block_size)
        device_lens = device_lens + seqs_gained
        if rows.layout.has_windows:
            first_positions = first_positions + seqs_gained.repeat(num_groups).unsqueeze(1)
        most = int(seq_lens.max(initial=1)) + rows.unsettled.max_accepted
        width = min(-(-most // block_size), rows.device_tables.ids.shape[1])
    first_columns = first_positions.clamp(min=0) // block_size
    attention = AttentionInputs(
        num_decodes=num_decodes,
        slot_mapping=slots,
        block_tables=rows.device_tables.read(table_index, width, first_columns),
        query_start=chunk_starts,
        seq_lens=device_lens,
        first_rows=device_first_rows,
        chunks=ChunkBounds(chunk_lens.tolist(), seq_lens[num_decodes:].tolist()),
        decode_lens=seq_lens[:num_decodes] if accepted is None else None,
        own_tokens=None if own_tokens is None else OwnTokens(own_tokens, own_tokens),
        generated=_generated_tokens(rows, own) if device.type == "cpu" else None,
        images=images,
    )
    if rows.partition is not None:
        rows.partition.renumber(attention.block_tables, slots, block_size)
    if num_groups > 1:
        tables = attention.block_tables.chunk(num_groups)
        of_layers = split_groups(slots.chunk(num_groups), tables, rows.layout.splits, block_size)
        attention = with_groups(attention, *of_layers)
    return (
        rows.token_ids[token_rows, positions],
        rotary_positions,
        others[0] if others else None,
        attention,
    )


def _generated_tokens(rows: DeviceRows, layout: _Layout) -> GeneratedTokens | None:
    """Return the tokens of chunks that are no prompt's. Returns None if there are none."""
    chunks = layout.rows[layout.num_decodes :]
    if not (layout.seq_lens[layout.num_decodes :] > rows.prompt_lens[chunks]).any():
        return None
    first = int(layout.query_lens[: layout.num_decodes].sum())
    is_generated = layout.positions >= rows.prompt_lens[layout.token_rows]
    is_generated[:first] = False
    sequences = np.repeat(np.arange(layout.rows.size), layout.query_lens)[is_generated]
    lens = (layout.positions[is_generated] + 1).astype(np.int32)
    index = np.flatnonzero(is_generated)
    return GeneratedTokens(*(torch.from_numpy(each) for each in (index, sequences, lens)))


def _own_part(rows: DeviceRows, layout: _Layout) -> _OwnPart | None:
    """Return the part of a step that this rank attends for. Returns None if it attends for all of it."""
    if rows.partition is None:
        return None
    is_own = rows.partition.has(rows.tables.ids[layout.rows, 0])
    is_own_token = np.repeat(is_own, layout.query_lens)
    own = replace(
        layout,
        num_decodes=int(is_own[: layout.num_decodes].sum()),
        rows=layout.rows[is_own],
        query_lens=layout.query_lens[is_own],
        seq_lens=layout.seq_lens[is_own],
        ends=np.cumsum(layout.query_lens[is_own], dtype=np.int64),
        token_rows=layout.token_rows[is_own_token],
        positions=layout.positions[is_own_token],
    )
    return _OwnPart(own, np.flatnonzero(is_own_token))


def _sent_slots(rows: DeviceRows, token_rows: LongArray) -> IntArray | None:
    """Return the adapters' slots of the tokens that this rank sends to their experts; None if none travel.

    Args:
        token_rows: of the tokens between layers.
    """
    if rows.sender is None:
        return None
    own = own_indices(*rows.sender, token_rows.size)
    return rows.lora_slots[token_rows[own.start : own.stop]]


def _first_positions(rows: DeviceRows, layout: _Layout) -> LongArray:
    """Return the first position that each sequence's tokens attend to, [G * S, 1], of each group in turn.

    It is negative before a window is full. Returns an empty array for a model without windows.
    """
    if not rows.layout.has_windows:
        return np.empty(0, np.int64)
    windows = np.array([group.window or rows.max_len for group in rows.layout.groups])[:, None]
    first_positions: LongArray = ((layout.seq_lens - layout.query_lens + 1) - windows).astype(np.int64)
    return first_positions.reshape(-1, 1)


def _repeat_for_drafts(rows: LongArray, counts: IntArray) -> tuple[LongArray, IntArray]:
    """Repeat each row for its tokens; return the rows, and the offset of each from its newest token."""
    ends = np.cumsum(counts)
    repeated = np.repeat(rows, counts)
    offsets = np.arange(repeated.size) - np.repeat(ends - counts, counts)
    return repeated, offsets.astype(np.int32)


def compute_slots(
    rows: DeviceRows, tables: IntArray | RowArray, positions: LongArray, block_size: int
) -> LongArray:
    """Return the slot of each token, ``block_id * B + offset``, [T] int64.

    Args:
        tables: number of each token's block table: its row for the first cache group.
    """
    index, offsets = np.divmod(positions, block_size)
    return rows.tables.ids[tables, index].astype(np.int64) * block_size + offsets


def _slots_on_device(rows: DeviceRows, tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return what `compute_slots` does, of tables and positions on the device."""
    blocks = rows.device_tables.ids[tables, positions // block_size]
    return blocks.long() * block_size + positions % block_size


def _scored_tokens(
    rows: DeviceRows, plan: StepPlan, starts: IntArray, sources: IntArray
) -> ScoredTokens | None:
    """Return the prompt tokens whose log-probabilities the step computes. Returns None if there are none.

    Args:
        starts: [C], the first position of each chunk.
        sources: [C], index of each chunk's first token among the step's T tokens.
    """
    if not rows.sampling.scores[plan.chunk_rows].any():
        return None
    return select_scored_tokens(rows.sampling.scoring, plan.chunk_rows, starts, plan.chunk_lens, sources)


def _pooled_tokens(
    rows: DeviceRows, plan: StepPlan, starts: IntArray, sources: IntArray
) -> PooledTokens | None:
    """Return the prompt tokens of pooled rows; the arguments are those of `_scored_tokens`."""
    chunk_rows = plan.chunk_rows
    if not rows.pools[chunk_rows].any():
        return None
    prompt_lens = rows.lens[chunk_rows]
    return select_pooled_tokens(rows.pooling, chunk_rows, starts, plan.chunk_lens, sources, prompt_lens)


def decoding_rows(rows: DeviceRows, plan: StepPlan) -> LongArray:
    """Return the rows that compute their newest token, [n] int64: others index arrays in ten times the time."""
    computes = rows.decoding
    if plan.held_rows.size:
        computes = computes.copy()
        computes[plan.held_rows] = False
    return computes.nonzero()[0]


def _check(rows: DeviceRows, layout: _Layout, block_size: int, num_drafted: IntArray | None) -> None:
    """Check ranges; otherwise a step could silently read and write blocks of other sequences."""
    row_ids, seq_lens = layout.rows, layout.seq_lens
    _raise_if_any(row_ids, layout.query_lens < 1, "an empty chunk")
    lens = rows.lens[row_ids] if num_drafted is None else rows.lens[row_ids] + num_drafted[row_ids]
    _raise_if_any(row_ids, seq_lens > np.minimum(lens, rows.max_len), "more tokens than it has")
    _raise_if_any(
        row_ids, seq_lens > rows.tables.lens[row_ids] * block_size, "more tokens than its blocks hold"
    )


def _raise_if_any(row_ids: LongArray, is_wrong: npt.NDArray[np.bool_], what: str) -> None:
    if np.count_nonzero(is_wrong):
        raise ValueError(f"the plan computes {what} for row {row_ids[is_wrong][0]}")
