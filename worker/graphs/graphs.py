"""Steps recorded as graphs, which replace hundreds of kernel launches by one.

A graph replays the same kernels on the same addresses. There are graphs of a few numbers of decoding rows, and of a
few numbers of rows and prompt tokens for small steps with chunks (see graph_shapes). With LoRA there are graphs of
decoding rows with adapters besides, each for any mix of adapters. A graph's inputs are copied to
fixed buffers, and padding, which writes nothing, fills a step up to the graph's shape. All graphs are recorded before
the first step, so no step waits for a recording. All ranks record the same shapes in the same order, as collectives
may require. They also agree on whether each succeeded: if one rank replayed a graph while another computed the step,
their collectives might differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.state_runs import StateRuns
from ...kernels.workspace import workspaces
from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.errors import first_line
from ..attention import AttentionInputs, OwnTokens, SplitRule, with_groups
from ..comm.pipeline import NO_LINK, StageLink
from ..libraries.attention_backend import OWN_BACKEND, GraphAttention
from ..lora.step_adapters import NO_ADAPTERS, StepAdapters
from ..step.batch import Batch
from .graph_adapters import GraphAdapters
from .graph_shapes import (
    NUM_CHUNKS,
    GraphShape,
    adapted_shapes,
    bounded_shapes,
    decode_shapes,
    find_shape,
    mixed_shapes,
)

# Slot of tokens whose KV is not stored.
NO_SLOT = -1
_NO_LENS: IntArray = np.empty(0, np.int32)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded computation.

    Attributes:
        output: result, overwritten by each replay.
        workspaces: memory whose addresses were recorded; kept as long as the recording.
    """

    replay: Callable[[], None]
    output: Tensor
    workspaces: tuple[Tensor, ...] = ()


class GraphBackend(Protocol):
    """Recorder of the device operations of a function."""

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Execute `compute`, as a step would, for what cannot be done while recording."""
        ...

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record `compute`, without executing it, after `warm_up`.

        Raises:
            RuntimeError: the device cannot, for example because `compute` synchronizes.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share a memory pool; no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Compile the kernels and allocate their workspaces."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may query the device during the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(graph.replay, output, workspaces(self._device))


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of steps and of sequences.

    Attributes:
        max_decode_tokens: of a step without chunks.
        max_seq_len: tokens of the blocks in a block table.
        num_groups: cache groups, each as often as its places are split.
        dp_attention: steps have OwnTokens.
        num_lora_slots: adapters that a step may use; 0 without LoRA.
        records_chunks: steps with chunks are recorded. Those of latents are absorbed in a recording, which
            does not know their lengths, and batch-invariant ones are expanded. Layers with states compute the chunks
            of all ranks, and data-parallel attention those of its own.
        has_states: layers of the model keep states.
        gathers_keys: see Model.gathers_keys. Steps with chunks are not recorded then.
    """

    max_num_seqs: int
    max_decode_tokens: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    max_seq_len: int
    num_groups: int = 1
    dp_attention: bool = False
    num_lora_slots: int = 0
    records_chunks: bool = True
    has_states: bool = False
    gathers_keys: bool = False

    @classmethod
    def of(cls, config: EngineConfig, *, gathers_keys: bool = False) -> GraphLimits:
        """Return the limits of an engine."""
        scheduler, max_blocks = config.scheduler, config.max_blocks_per_seq
        max_seq_len = max_blocks * config.cache.block_size
        num_groups = sum(config.cache_layout.splits)
        return cls(
            scheduler.max_num_seqs,
            config.max_decode_tokens,
            scheduler.max_num_batched_tokens,
            max_blocks,
            max_seq_len,
            num_groups,
            config.parallel.enable_dp_attention,
            0 if config.lora is None else config.lora.max_loras,
            not gathers_keys
            and not (config.parallel.batch_invariant and config.model.latent_dim)
            and not (config.parallel.enable_dp_attention and config.model.has_states),
            config.model.has_states,
            gathers_keys,
        )

    @property
    def decode_shapes(self) -> list[GraphShape]:
        """Shapes of the graphs of decoding rows."""
        return self._bounded(decode_shapes(self.max_num_seqs, self.max_decode_tokens))

    @property
    def adapted_shapes(self) -> list[GraphShape]:
        """Shapes of the graphs of decoding rows with adapters."""
        return self._bounded(adapted_shapes(self.max_num_seqs, self.max_decode_tokens, self.num_lora_slots))

    def _bounded(self, shapes: list[GraphShape]) -> list[GraphShape]:
        return bounded_shapes(shapes, self.max_seq_len) if self.gathers_keys else shapes

    @property
    def mixed_shapes(self) -> list[GraphShape]:
        """Shapes of the graphs of steps with chunks."""
        return mixed_shapes(self.max_num_seqs, self.max_num_batched_tokens) if self.records_chunks else []

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes of all graphs."""
        return [*self.decode_shapes, *self.mixed_shapes]


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Inputs of a recorded step of T tokens, besides the weights and the KV cache.

    Attributes:
        token_ids: [T] int32.
        positions: [T] int64.
        attention: inputs of the attention kernels.
        sampled_index: [N] int64, tokens whose logits are computed; None for all.
        lora: the adapters of the tokens.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    sampled_index: Tensor | None
    lora: StepAdapters = NO_ADAPTERS
    state_runs: StateRuns | None = None


class Replay(NamedTuple):
    """A step that was replayed.

    Attributes:
        logits: [N, V] of the step's sampled rows, by row; the next replay overwrites them.
        num_decodes: decodes of the graph, with padding.
    """

    logits: Tensor
    num_decodes: int


class NoGraphs:
    """Stands in for StepGraphs if no steps are recorded."""

    shapes = ()

    def replay(self, batch: Batch) -> None:
        """Return None: there is no graph for the step."""

    def drop(self) -> None:
        """Do nothing: there are no graphs."""


class StepGraphs:
    """Graphs of one rank's steps.

    Args:
        compute: inputs of a step |-> logits [N, V].
        backend: CudaGraphs; tests use another.
        all_ranks: collective that returns whether its argument is true on all ranks.
        split_rule: how decodes are split.
        attention: what computes the attention of the decodes.
        link: to other pipeline stages, which transfers before and after replays.
        returns_states: `compute` returns hidden states for the next stage instead, [T, E].
    """

    def __init__(
        self,
        compute: Callable[[GraphInputs], Tensor],
        limits: GraphLimits,
        device: torch.device,
        backend: GraphBackend,
        all_ranks: Callable[[bool], bool],
        split_rule: SplitRule,
        attention: GraphAttention = OWN_BACKEND,
        link: StageLink = NO_LINK,
        *,
        returns_states: bool = False,
    ) -> None:
        self._compute = compute
        self._attention = attention
        self._decode_shapes = limits.decode_shapes
        self._mixed_shapes = limits.mixed_shapes
        self._adapted_shapes = limits.adapted_shapes
        self._max_seq_len = limits.max_seq_len
        self._block_size = limits.max_seq_len // limits.max_blocks_per_seq
        self._backend = backend
        self._all_ranks = all_ranks
        self._split_rule = split_rule
        self._link = link
        self._recordings: dict[GraphShape, Recording] = {}
        # Of all graphs: each would keep its own otherwise, 1.7 GB for up to 1,024 rows of 128,000 tokens.
        self._outputs: Tensor | None = None

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_rows = max(shape.num_rows for shape in limits.shapes)
        num_tokens = self._max_tokens = max(shape.num_tokens for shape in limits.shapes)
        self._max_outputs = num_tokens if returns_states else num_rows
        self._token_ids = zeros(num_tokens)
        self._positions = zeros(num_tokens, dtype=torch.int64)
        # Of each cache group.
        self._slot_mappings = zeros(limits.num_groups, num_tokens, dtype=torch.int64).fill_(NO_SLOT)
        self._block_tables = zeros(limits.num_groups, num_rows, limits.max_blocks_per_seq)
        self._query_start = zeros(NUM_CHUNKS + 1)
        self._seq_lens = zeros(num_rows)
        # Of decodes; padding is its own first row, as rows without drafted tokens are.
        self._each_row = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._first_rows = self._each_row.clone()
        self._sampled_index = zeros(num_rows, dtype=torch.int64)
        # The state slot of each row, whether it begins with an empty state, and that it stores its state.
        self._states: tuple[Tensor, Tensor, Tensor] | None = None
        if limits.has_states:
            is_new, stores = zeros(num_rows, dtype=torch.bool), zeros(num_rows, dtype=torch.bool)
            self._states = zeros(num_rows), is_new, stores.fill_(True)
        self._own_tokens: OwnTokens | None = None
        if limits.dp_attention:
            index, places = zeros(2, num_tokens, dtype=torch.int64)
            self._own_tokens = OwnTokens(index, places)
        self._adapters = GraphAdapters(
            limits.max_decode_tokens,
            limits.num_lora_slots,
            device,
            dp_attention=limits.dp_attention,
        )

    @property
    def shapes(self) -> list[GraphShape]:
        """Shapes of the recorded graphs, the smallest first of each kind; those of decodes come first."""
        shapes = (*self._decode_shapes, *self._mixed_shapes, *self._adapted_shapes)
        return [shape for shape in shapes if shape in self._recordings]

    def replay(self, batch: Batch) -> Replay | None:
        """Replay the step's graph. Returns None if there is no graph for the step."""
        shape = self._find_for(batch)
        recording = None if shape is None else self._recordings.get(shape)
        if shape is None or recording is None:
            return None
        self._copy_inputs(batch, shape)
        self._plan_attention(shape, batch.attention.decode_lens)
        self._link.begin_replay(shape.num_tokens)
        recording.replay()
        self._link.end_replay(recording.output)
        return Replay(recording.output[: len(batch.sampled_rows)], shape.num_decodes)

    def _find_for(self, batch: Batch) -> GraphShape | None:
        """Return the shape whose graph may replay a batch. Returns None if there is none."""
        num_decodes, num_sampled = batch.num_decodes, len(batch.sampled_rows)
        num_chunks = len(batch.rows) - num_decodes
        if (
            batch.scored is not None
            or batch.media is not None
            or batch.attention.images.spans  # of prompts that attend to all of their tokens, also without images
            or batch.positions.dim() > 1
            or (num_chunks > 0 and not batch.lora.is_empty)
            or batch.pooled is not None
            or (batch.has_drafts and batch.state_runs is not None)  # keeps the inputs of its recurrences
            or (batch.state_runs is not None and batch.state_runs.cuts is not None)
            or (num_chunks == 0 and num_sampled < num_decodes)
        ):
            return None
        shapes = self._mixed_shapes if num_chunks else self._decode_shapes
        if not batch.lora.is_empty:
            shapes = self._adapted_shapes
        num_chunk_tokens = len(batch.token_ids) - num_decodes
        return find_shape(shapes, num_decodes, num_chunks, num_chunk_tokens, int(batch.lens.max()))

    def drop(self) -> None:
        """Drop all graphs; further steps are computed. Another thread may be in `replay`."""
        self._recordings.clear()

    def record_all(self) -> None:
        """Record all graphs, those of most rows first, whose memory the others share; called on all ranks.

        If a rank cannot record one, its kind of graph is disabled on all ranks. A failure to execute the step is
        raised.
        """
        started = time.perf_counter()
        if self._record_each(self._decode_shapes):
            self._record_each(self._mixed_shapes)
            self._record_each(self._adapted_shapes)
        _log.info("recorded %d graphs in %.2f s", len(self._recordings), time.perf_counter() - started)

    def _record_each(self, shapes: Sequence[GraphShape]) -> bool:
        """Record the graphs of one kind, the largest first. Returns whether all ranks can."""
        for shape in reversed(shapes):
            self._make_padding(shape)
            recording = self._record(shape)
            if not self._all_ranks(recording is not None):
                for recorded in shapes:
                    self._recordings.pop(recorded, None)
                _log.warning(
                    "graphs are disabled: a step of %d decodes and %d prompt tokens%s cannot be recorded on every "
                    "rank",
                    shape.num_decodes,
                    shape.num_chunk_tokens,
                    " with adapters" if shape.has_adapters else "",
                )
                return False
            if recording is not None:
                self._recordings[shape] = recording
        return True

    def _record(self, shape: GraphShape) -> Recording | None:
        def compute() -> Tensor:
            return self._run_step(shape)

        self._plan_attention(shape, None)
        with self._link.recording(self._max_tokens):
            self._backend.warm_up(compute)
            try:
                return self._backend.record(compute)
            except RuntimeError as error:
                _log.warning("disabling graphs, a step cannot be recorded: %s", first_line(error))
                return None

    def _run_step(self, shape: GraphShape) -> Tensor:
        """Compute a step from the buffers; this is the recorded function."""
        num_decodes, num_rows, num_tokens = shape.num_decodes, shape.num_rows, shape.num_tokens
        seq_lens = self._seq_lens[:num_rows]
        splits = None
        if seq_lens.is_cuda:
            first_rows = self._first_rows[:num_decodes]
            splits = self._split_rule.split(seq_lens[:num_decodes], self._max_seq_len, first_rows)
        own, num_blocks = self._own_tokens, -(-(shape.max_len or self._max_seq_len) // self._block_size)
        block_tables = self._block_tables[:, :num_rows, :num_blocks]
        attention = AttentionInputs(
            num_decodes=num_decodes,
            slot_mapping=self._slot_mappings[0, :num_tokens],
            block_tables=block_tables[0],
            query_start=self._query_start[: shape.num_chunks + 1],
            seq_lens=seq_lens,
            splits=splits,
            own_tokens=None if own is None else OwnTokens(own.index[:num_tokens], own.places[:num_tokens]),
            library=self._attention.of_decodes(num_decodes),
        )
        if len(self._block_tables) > 1:
            slot_mappings = self._slot_mappings[:, :num_tokens]
            attention = with_groups(attention, slot_mappings.unbind(), block_tables.unbind())
        sampled_index = self._sampled_index[:num_rows] if shape.num_chunks else None
        lora = self._adapters.of_rows(num_rows) if shape.has_adapters else NO_ADAPTERS
        inputs = GraphInputs(
            self._token_ids[:num_tokens],
            self._positions[:num_tokens],
            attention,
            sampled_index,
            lora,
            self._state_runs(shape),
        )
        return self._keep(self._compute(inputs))

    def _plan_attention(self, shape: GraphShape, lens: IntArray | None) -> None:
        """Plan the attention of the decodes from the buffers; of padding if the host knows no lengths."""
        known = _NO_LENS if lens is None else lens
        self._attention.plan(shape.num_decodes, self._block_tables.unbind(), known)

    def _state_runs(self, shape: GraphShape) -> StateRuns | None:
        if self._states is None:
            return None
        slots, is_new, stores = (each[: shape.num_rows] for each in self._states)
        decodes = torch.arange(shape.num_decodes, dtype=torch.int32, device=slots.device)
        starts = torch.cat((decodes, self._query_start[: shape.num_chunks + 1] + shape.num_decodes))
        return StateRuns(slots, starts, is_new, max(1, shape.num_chunk_tokens), stores)

    def _keep(self, output: Tensor) -> Tensor:
        """Copy logits or hidden states to the memory that all graphs share."""
        if self._outputs is None:
            self._outputs = output.new_empty(self._max_outputs, output.shape[1])
        return self._outputs[: len(output)].copy_(output)

    def _copy_inputs(self, batch: Batch, shape: GraphShape) -> None:
        """Copy a step's inputs to the buffers, with padding after its decodes and after its chunks.

        Those of attention have as many decodes and chunks as this rank attends for.
        """
        attention, first_chunk = batch.attention, shape.num_decodes
        num_decodes, num_chunks = attention.num_decodes, len(attention.seq_lens) - attention.num_decodes
        num_chunk_tokens = len(attention.slot_mapping) - num_decodes

        def copy(buffer: Tensor, values: Tensor, num_decodes: int = num_decodes) -> None:
            buffer[:num_decodes].copy_(values[:num_decodes])
            if shape.num_chunks:
                others = values[num_decodes:]
                buffer[first_chunk : first_chunk + len(others)].copy_(others)

        if not batch.lora.is_empty:
            self._adapters.copy(batch.lora, shape.num_rows)
        copy(self._token_ids, batch.token_ids, batch.num_decodes)
        copy(self._positions, batch.positions, batch.num_decodes)
        if attention.own_tokens is not None and self._own_tokens is not None:
            # The tokens of chunks move behind the padding of all decodes.
            own = attention.own_tokens.index
            moved = own + (first_chunk - batch.num_decodes) * (own >= batch.num_decodes)
            self._own_tokens.index[: shape.num_tokens].zero_()
            self._own_tokens.places[: shape.num_tokens].fill_(shape.num_tokens)
            copy(self._own_tokens.index, moved)
            copy(self._own_tokens.places, moved)
        for group, (slot_mapping, tables) in enumerate(
            zip(self._slot_mappings, self._block_tables, strict=True)
        ):
            of_group = attention.of_group(group)
            copy(slot_mapping, of_group.slot_mapping)
            # Columns beyond these are stale, but also beyond the rows' lengths.
            copy(tables[:, : of_group.block_tables.shape[1]], of_group.block_tables)
        copy(self._seq_lens, attention.seq_lens)
        self._copy_first_rows(attention.first_rows)
        if self._states is not None and batch.state_runs is not None:
            self._clear_states(shape)
            copy(self._states[0], batch.state_runs.slots, batch.num_decodes)
            copy(self._states[1], batch.state_runs.is_new, batch.num_decodes)
        self._slot_mappings[:, num_decodes:first_chunk].fill_(NO_SLOT)
        self._seq_lens[num_decodes:first_chunk].zero_()
        if shape.num_chunks:
            self._slot_mappings[:, first_chunk + num_chunk_tokens : shape.num_tokens].fill_(NO_SLOT)
            self._seq_lens[first_chunk + num_chunks : shape.num_rows].zero_()
            self._query_start[: num_chunks + 1].copy_(attention.query_start)
            self._query_start[num_chunks + 1 :].fill_(num_chunk_tokens)
            self._copy_sampled_index(batch, first_chunk - batch.num_decodes)

    def _copy_first_rows(self, first_rows: Tensor | None) -> None:
        """Copy the first rows of sequences; None if each row is one."""
        if self._split_rule.max_run_rows > 1:
            self._first_rows.copy_(self._each_row)
            if first_rows is not None:
                self._first_rows[: len(first_rows)].copy_(first_rows)

    def _clear_states(self, shape: GraphShape) -> None:
        """Let all rows begin with an empty state and end in the scratch slot, as padding does."""
        if self._states is not None:
            self._states[0][: shape.num_rows].zero_()
            self._states[1][: shape.num_rows].fill_(True)

    def _copy_sampled_index(self, batch: Batch, num_padding: int) -> None:
        """Copy the indices of the sampled tokens; those of chunks move behind the decodes' padding.

        The others become 0: an index of a larger step would exceed the tokens of this one, which a GPU asserts.
        """
        assert batch.sampled_index is not None
        is_of_chunk = batch.sampled_index >= batch.num_decodes
        moved = batch.sampled_index + num_padding * is_of_chunk
        self._sampled_index[: len(moved)].copy_(moved)
        self._sampled_index[len(moved) :].zero_()

    def _make_padding(self, shape: GraphShape) -> None:
        """Make the buffers of a shape padding: rows of length 0, and tokens without a slot. Their ids stay stale."""
        self._slot_mappings[:, : shape.num_tokens].fill_(NO_SLOT)
        self._seq_lens[: shape.num_rows].zero_()
        self._copy_first_rows(None)
        self._query_start.zero_()
        self._clear_states(shape)
        self._sampled_index.zero_()
        self._adapters.clear()
        if self._own_tokens is not None:
            self._own_tokens.places.fill_(shape.num_tokens)
