"""Decode steps recorded as graphs, which replace hundreds of kernel launches by one.

A graph replays the same kernels on the same addresses. There is one graph for each of a few batch sizes. Its inputs
are copied to fixed buffers, and padding rows, which write nothing, fill a batch up to the graph's size. All graphs
are recorded before the first step, so no step waits for a recording. All ranks record the same sizes in the same
order, as collectives may require. They also agree on whether each succeeded: if one rank replayed a graph while
another computed the step, their collectives might differ.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.decode_splits import split_decodes
from ..kernels.workspace import workspaces
from ..proto.errors import first_line
from .attention import AttentionInputs
from .batch import Batch

# Slot of tokens whose KV is not stored.
NO_SLOT = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step of S rows, besides the weights and the KV cache.

    Attributes:
        token_ids: [S] int32.
        positions: [S] int64.
        attention: inputs of the attention kernels.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs


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


class DecodeGraphs:
    """Graphs of one rank's decode steps.

    Args:
        compute: inputs of a decode step |-> logits [S, V].
        max_num_seqs: rows of the largest batch.
        max_blocks_per_seq: length of a block table.
        block_size: tokens per block.
        backend: CudaGraphs; tests use another.
        all_ranks: collective that returns whether its argument is true on all ranks.
        fixed_item_len: as for split_decodes.
    """

    def __init__(
        self,
        compute: Callable[[DecodeInputs], Tensor],
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        device: torch.device,
        backend: GraphBackend,
        all_ranks: Callable[[bool], bool],
        fixed_item_len: int | None = None,
    ) -> None:
        self._compute = compute
        self._sizes = graph_sizes(max_num_seqs)
        self._max_seq_len = max_blocks_per_seq * block_size
        self._backend = backend
        self._all_ranks = all_ranks
        self._fixed_item_len = fixed_item_len
        self._recordings: dict[int, Recording] = {}

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(max_num_seqs)
        self._positions = zeros(max_num_seqs, dtype=torch.int64)
        self._slot_mapping = zeros(max_num_seqs, dtype=torch.int64).fill_(NO_SLOT)
        self._block_tables = zeros(max_num_seqs, max_blocks_per_seq)
        self._query_start = zeros(1)
        self._seq_lens = zeros(max_num_seqs)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the recorded graphs."""
        return sorted(self._recordings)

    def replay(self, batch: Batch) -> Tensor | None:
        """Return the logits [S, V], by row, of a step in which all rows decode and sample.

        The next replay overwrites them. Returns None if there is no graph for the step.
        """
        num_rows = len(batch.rows)
        if not self._recordings or not batch.attention.num_decodes == len(batch.sampled_rows) == num_rows:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        recording = self._recordings[size]
        self._copy_inputs(batch, num_rows, size)
        recording.replay()
        return recording.output[:num_rows]

    def record_all(self) -> None:
        """Record the graphs of all sizes, the largest first, whose memory the others share; called on all ranks.

        If a rank cannot record one, graphs are disabled on all ranks. A failure to execute the step is raised.
        """
        started = time.perf_counter()
        for size in reversed(self._sizes):
            self._pad(0, size)
            recording = self._record(size)
            if not self._all_ranks(recording is not None):
                self._recordings.clear()
                _log.warning(
                    "graphs are disabled: a decode step of %d rows cannot be recorded on every rank", size
                )
                return
            if recording is not None:
                self._recordings[size] = recording
        _log.info("recorded %d graphs in %.2f s", len(self._recordings), time.perf_counter() - started)

    def _record(self, size: int) -> Recording | None:
        def compute() -> Tensor:
            return self._run_step(size)

        self._backend.warm_up(compute)
        try:
            return self._backend.record(compute)
        except RuntimeError as error:
            _log.warning("disabling graphs, a decode step cannot be recorded: %s", first_line(error))
            return None

    def _run_step(self, size: int) -> Tensor:
        """Compute a decode step of `size` rows from the buffers; this is the recorded function."""
        seq_lens = self._seq_lens[:size]
        splits = None
        if seq_lens.is_cuda:
            splits = split_decodes(seq_lens, self._max_seq_len, self._fixed_item_len)
        attention = AttentionInputs(
            num_decodes=size,
            slot_mapping=self._slot_mapping[:size],
            block_tables=self._block_tables[:size],
            query_start=self._query_start,
            seq_lens=seq_lens,
            splits=splits,
        )
        return self._compute(DecodeInputs(self._token_ids[:size], self._positions[:size], attention))

    def _copy_inputs(self, batch: Batch, num_rows: int, size: int) -> None:
        attention = batch.attention
        self._token_ids[:num_rows].copy_(batch.token_ids)
        self._positions[:num_rows].copy_(batch.positions)
        self._slot_mapping[:num_rows].copy_(attention.slot_mapping)
        # Columns beyond these are stale, but also beyond the rows' lengths.
        self._block_tables[:num_rows, : attention.block_tables.shape[1]].copy_(attention.block_tables)
        self._seq_lens[:num_rows].copy_(attention.seq_lens)
        self._pad(num_rows, size)

    def _pad(self, start: int, end: int) -> None:
        """Make padding of rows: length 0 and no slot. Their tokens stay stale."""
        self._slot_mapping[start:end].fill_(NO_SLOT)
        self._seq_lens[start:end].zero_()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of graphs; padding is at most a third of a batch of more than 8 rows."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    midpoints = [power + power // 2 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *midpoints) if size < max_num_seqs} | {max_num_seqs})
