"""Decode steps as recorded graphs: one launch in the place of hundreds.

A graph replays the same kernels on the same addresses. So there is one for each of a few batch sizes, and its inputs
are copied to buffers that never move; rows that fill a batch up to the next size are padding, which writes nothing.
Recording takes a good part of a second and happens while requests run: after the answer to a step is out, at most
one graph in CAPTURE_INTERVAL steps, and only of sizes that were needed. Ranks record at the same step, because they
decide by nothing but the plans: what records a collective may have to meet the other ranks.
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
from ..proto.errors import first_line
from .attention import AttentionInputs
from .batch import Batch

# At 10 ms a step and 0.2 s a graph it takes a quarter of the time until all graphs are there.
CAPTURE_INTERVAL = 64
# Of tokens that are stored nowhere.
NO_SLOT = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step of S rows reads, besides the weights and the KV cache.

    Attributes:
        token_ids: [S] int32.
        positions: [S] int64.
        attention: without splits, which the step works out from it.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded computation.

    Attributes:
        output: what it computes, anew with each replay.
    """

    replay: Callable[[], None]
    output: Tensor


class GraphBackend(Protocol):
    """Records what a function has a device do."""

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Raises RuntimeError where the device cannot: the function waits for its results, for example."""
        ...


class CudaGraphs:
    """CUDA graphs that share their memory; no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        present = torch.cuda.current_stream()
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            compute()  # compiles kernels and allocates workspaces, which a recording may not
        present.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may go on asking the device.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(graph.replay, output)


class DecodeGraphs:
    """The graphs of one rank.

    Args:
        compute: inputs of a decode step |-> logits [S, V].
        max_num_seqs: rows of the largest batch.
        max_blocks_per_seq: of a block table.
        block_size: tokens a block.
        backend: CudaGraphs, but for tests.
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
        fixed_item_len: int | None = None,
    ) -> None:
        self._compute = compute
        self._sizes = graph_sizes(max_num_seqs)
        self._max_seq_len = max_blocks_per_seq * block_size
        self._backend = backend
        self._fixed_item_len = fixed_item_len
        self._recordings: dict[int, Recording] = {}
        self._wanted: int | None = None
        self._steps_to_wait = 0
        self._is_off = False

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
        """Of the graphs that are recorded."""
        return sorted(self._recordings)

    def replay(self, batch: Batch) -> Tensor | None:
        """Logits [S, V], by row, of a step in which all rows decode and sample. The next replay overwrites them.

        None: there is no graph for it, and the step is to be computed as any other.
        """
        num_rows = len(batch.rows)
        if self._is_off or not batch.attention.num_decodes == len(batch.sampled_rows) == num_rows:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        recording = self._recordings.get(size)
        if recording is None:
            self._wanted = size
            return None
        self._fill(batch, num_rows, size)
        recording.replay()
        return recording.output[:num_rows]

    def after_step(self) -> None:
        """Records a graph if one was missing and the last is long enough ago."""
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
        if self._wanted is None or self._steps_to_wait:
            return
        self._steps_to_wait = CAPTURE_INTERVAL
        size, self._wanted = self._wanted, None
        started = time.perf_counter()
        self._pad(0, size)
        try:
            self._recordings[size] = self._backend.record(lambda: self._step(size))
        except RuntimeError as error:
            self._is_off = True
            _log.warning("decode steps are not recorded as graphs: %s", first_line(error))
        else:
            _log.info("recorded a graph for %d rows in %.2f s", size, time.perf_counter() - started)

    def _step(self, size: int) -> Tensor:
        """What is recorded: reads nothing but the buffers."""
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

    def _fill(self, batch: Batch, num_rows: int, size: int) -> None:
        attention = batch.attention
        self._token_ids[:num_rows].copy_(batch.token_ids)
        self._positions[:num_rows].copy_(batch.positions)
        self._slot_mapping[:num_rows].copy_(attention.slot_mapping)
        # What is beyond these columns is older, and beyond the rows' lengths.
        self._block_tables[:num_rows, : attention.block_tables.shape[1]].copy_(attention.block_tables)
        self._seq_lens[:num_rows].copy_(attention.seq_lens)
        self._pad(num_rows, size)

    def _pad(self, start: int, end: int) -> None:
        """Rows that see nothing and are stored nowhere. Their tokens are whatever they were."""
        self._slot_mapping[start:end].fill_(NO_SLOT)
        self._seq_lens[start:end].zero_()


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that have a graph: close enough that padding is at most a third of a batch of more than 8 rows."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    between = [power + power // 2 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *between) if size < max_num_seqs} | {max_num_seqs})
