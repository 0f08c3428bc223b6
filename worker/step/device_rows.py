"""DeviceRows: a rank's persistent state of running sequences, updated by the differences in each plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.block_tables import update_block_tables
from ...kernels.decode_inputs import RowTables
from ...proto.block_tables import BlockTables, IntArray, RowArray
from ...proto.config import EngineConfig
from ...proto.lora import NO_SLOT
from ...proto.pooling import PoolingParams
from ...proto.step import NewSequence, StepPlan
from ..comm.communicator import Communicator
from ..comm.shard import Shard
from ..memory.host_to_device import to_device, to_device_together
from ..memory.kv_memory import KvPartition
from ..sampling.custom_processors import load_custom_processors
from ..sampling.logits_processors import LogitsProcessorState
from ..sampling.sampling_table import SamplingTable
from ..structured.constraint_state import ConstraintState
from .media_rows import MediaRows
from .unsettled_steps import UnsettledSteps


class DeviceRows:
    """Persistent state of R = `max_num_seqs` rows (batch slots), one sequence each.

    State that the scheduler determines is in numpy, so that no step waits for the device. Tokens, which the device
    samples, are on the device. So is the number of drafted tokens that unsettled steps have accepted: `lens`,
    `num_computed`, and the positions that methods take are without them.

    Attributes:
        max_len: most tokens that a row may compute.
        has_states: layers of the model keep states, in the slots of `tables`.
        layout: the cache groups.
        tables: block tables, a copy of the scheduler's.
        device_tables: the same on the device.
        token_ids: [R, max_len + 1] int32 on the device, prompt and output.
        lens: [R] int32, known tokens.
        prompt_lens: [R] int32, of which the prompt has.
        num_computed: [R] int32, tokens whose KV is in the cache.
        lora_slots: [R] int32, slot of each row's adapter; NO_SLOT for none.
        decoding: [R] bool, rows that compute their newest token in each step.
        media: the images of rows.
        sampling: sampling parameters.
        logits_processors: logits processors.
        pooling: [R], the params of pooled rows; None for rows that generate.
        pools: [R] bool, rows that have `pooling`.
        one_each: [R] int32, ones.
        unsettled: steps whose accepted drafted tokens only the device knows.
        row_tables: of a CPU, for models with one cache group without a window; None for others.
        partition: the blocks on this rank, which attends for the rows that have them; None if it has all. Set when
            the KV cache is allocated.
        sender: number of this rank among those that have the same tokens between layers, and how many these are, if
            each sends an even part of the tokens to their experts; None if tokens do not travel.

    Args:
        shard: this rank's part of the vocabulary.
        comm: the tensor-parallel group, which custom logits processors need.
        samples: this rank's pipeline stage samples; others need no settings of sampling.
    """

    def __init__(
        self,
        config: EngineConfig,
        shard: Shard,
        device: torch.device,
        comm: Communicator,
        *,
        samples: bool = True,
    ) -> None:
        num_rows, max_len = config.scheduler.max_num_seqs, config.model.max_model_len
        self.max_len = max_len
        self._samples = samples
        self.has_states = config.model.has_states
        self.layout = config.cache_layout
        self.tables = BlockTables(num_rows, config.max_blocks_per_seq, len(self.layout.groups))
        self.device_tables = DeviceTables(self.tables, device)
        self.token_ids = torch.zeros(num_rows, max_len + 1, dtype=torch.int32, device=device)
        self.lens: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.prompt_lens: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.lora_slots: IntArray = np.full(num_rows, NO_SLOT, dtype=np.int32)
        self.decoding = np.zeros(num_rows, dtype=np.bool_)
        self.one_each: IntArray = np.ones(num_rows, dtype=np.int32)
        self.unsettled = UnsettledSteps(self.lens, self.num_computed)
        self.row_tables: RowTables | None = None
        if device.type == "cpu" and len(self.layout.groups) == 1 and not self.layout.has_windows:
            block_tables = self.device_tables.ids
            self.row_tables = RowTables(self.token_ids, self.lens, block_tables, config.cache.block_size)
        self.partition: KvPartition | None = None
        self.sender: tuple[int, int] | None = None
        self.media = MediaRows(
            config.model.vision, num_rows, sees_whole_prompt=config.model.sees_whole_prompt
        )
        self.sampling = SamplingTable(num_rows, config.model.vocab_size)
        self.pooling: list[PoolingParams | None] = [None] * num_rows
        self.pools = np.zeros(num_rows, dtype=np.bool_)
        constraints = ConstraintState(config.model, shard, num_rows)
        custom = load_custom_processors(config, comm, shard, self.token_ids)
        self.logits_processors = LogitsProcessorState(shard, self.token_ids, constraints, custom)

    def apply(self, plan: StepPlan) -> None:
        """Apply steps 1 to 3 and 5 of the plan, all changes of rows. The caller compares digests.

        Most plans change little, and numpy's ops on empty arrays take a microsecond each.
        """
        if plan.released_rows.size:
            self._release(plan.released_rows)
        for sequence in plan.new:
            self._put(sequence)
        if plan.trimmed_rows.size:
            self.tables.trim(plan.trimmed_rows, plan.trimmed_lens)
            self.device_tables.trim(plan.trimmed_rows, plan.trimmed_lens)
        self.tables.append(plan.appended_rows, plan.appended_ids)
        self.device_tables.update()
        if plan.selected_rows.size:
            self._replace_newest(plan.selected_rows, plan.selected_ids)

    def clear(self) -> None:
        """Empty all rows."""
        self.unsettled.clear()
        self._release(np.arange(len(self.lens), dtype=np.int32))

    def _release(self, rows: IntArray) -> None:
        self.tables.release(rows)
        self.device_tables.release(rows)
        self.unsettled.forget(rows)
        self.decoding[rows] = False
        self.lora_slots[rows] = NO_SLOT
        self.logits_processors.release(rows)
        self.media.release(rows)

    def mark_computed(self, rows: IntArray | RowArray, lens: IntArray | RowArray) -> None:
        """Set the number of tokens of rows whose KV is in the cache."""
        self.num_computed[rows] = lens

    def append(self, rows: IntArray | RowArray, positions: IntArray | RowArray, token_ids: Tensor) -> None:
        """Append the sampled tokens of rows, which decode from now on; all tokens before them are computed.

        Args:
            rows: [N]; a row with several tokens repeats.
            positions: [N], of the tokens; ascending for each row.
            token_ids: [N] int32 on the device, in the order of `rows`.
        """
        self.write(rows, positions, token_ids)
        self.logits_processors.append(rows, token_ids)
        self.count_sampled(rows, positions)

    def count_sampled(self, rows: IntArray | RowArray, positions: IntArray | RowArray) -> None:
        """Count sampled tokens of rows as `append` does, whose values are not here yet."""
        self.lens[rows] = positions + 1
        self.num_computed[rows] = positions
        self.decoding[rows] = True

    def write_drafts(self, rows: RowArray, lens: IntArray, token_ids: IntArray) -> None:
        """Write drafted tokens behind the known ones; they count as unknown.

        Args:
            lens: [n], tokens of each of the distinct rows.
            token_ids: [sum of lens] int32.
        """
        ends = np.cumsum(lens)
        positions = (np.arange(token_ids.size) + np.repeat(self.lens[rows] + lens - ends, lens)).astype(
            np.int32
        )
        device_ids = to_device(token_ids, self.token_ids.device, torch.int32)
        self.write(np.repeat(rows, lens), positions, device_ids)

    def read_tokens(self, rows: IntArray | RowArray, starts: IntArray, ends: IntArray) -> list[IntArray]:
        """Return tokens `starts` to `ends` of each row; on a GPU the host waits for them."""
        if self.token_ids.is_cpu:
            known = self.token_ids.numpy()
            ranges = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
            return [known[row, start:end] for row, start, end in ranges]
        counts = ends - starts
        bounds = np.cumsum(counts)
        positions = np.arange(bounds[-1]) + np.repeat(ends - bounds, counts)
        index = [np.repeat(rows, counts).astype(np.int64), positions.astype(np.int64)]
        tokens = self.token_ids[tuple(to_device_together(index, self.token_ids.device))].cpu().numpy()
        return np.split(tokens, bounds[:-1])

    def equals_known(
        self, rows: IntArray | RowArray, positions: IntArray | RowArray, token_ids: Tensor
    ) -> npt.NDArray[np.bool_]:
        """Return whether tokens equal those at their positions, drafted ones included; on a CPU."""
        # numpy indexes few elements in a third of torch's time.
        is_same: npt.NDArray[np.bool_] = self.token_ids.numpy()[rows, positions] == token_ids.numpy()
        return is_same

    def replace_drafts(self, rows: RowArray, positions: RowArray, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Write samples over drafted tokens; the host does not wait.

        Returns:
            the rows, [N] int64, and whether the samples are equal to the drafted tokens, [N] bool, on the device.
        """
        places = self._places(rows, positions)
        is_same = self.token_ids[places] == token_ids
        self.token_ids[places] = token_ids
        return places[0], is_same

    def _replace_newest(self, rows: IntArray, token_ids: IntArray) -> None:
        self.write(rows, self.lens[rows] - 1, to_device(token_ids, self.token_ids.device, torch.int32))
        self.logits_processors.replace_newest(rows, token_ids)

    def write(self, rows: IntArray | RowArray, positions: IntArray | RowArray, token_ids: Tensor) -> None:
        """Write tokens, [N] int32 on the device; tokens behind the known ones are drafted and count as unknown."""
        if self.token_ids.is_cpu:
            self.token_ids.numpy()[rows, positions] = token_ids.numpy()
            return
        self.token_ids[self._places(rows, positions)] = token_ids

    def _places(self, rows: IntArray | RowArray, positions: IntArray | RowArray) -> tuple[Tensor, Tensor]:
        """Return the rows and the positions of tokens on the device, [N] int64."""
        index = [rows.astype(np.int64), positions.astype(np.int64)]
        device_rows, device_positions = to_device_together(index, self.token_ids.device)
        if (accepted := self.unsettled.accepted) is not None:
            device_positions = device_positions + accepted.index_select(0, device_rows)
        return device_rows, device_positions

    def _put(self, sequence: NewSequence) -> None:
        row, length, start = sequence.row, sequence.num_tokens, sequence.num_source_tokens
        self.token_ids[row, start:length] = to_device(sequence.token_ids, self.token_ids.device, torch.int32)
        if start:
            assert sequence.source_row is not None, f"row {row} is to have tokens of no row"
            self.token_ids[row, :start] = self.token_ids[sequence.source_row, :start]
        self.lens[row] = length
        self.prompt_lens[row] = length - sequence.num_generated
        self.num_computed[row] = sequence.num_computed_tokens
        self.decoding[row] = False
        self.lora_slots[row] = sequence.lora_slot
        self.tables.put(row, sequence.block_ids)
        if sequence.state_slot:
            self.tables.put_state(row, sequence.state_slot)
        self.sampling.put(row, sequence.sampling)
        self.pooling[row] = sequence.pooling
        self.pools[row] = sequence.pooling is not None
        if self._samples:
            self.logits_processors.put(sequence)
        self.media.put(sequence)


class DeviceTables:
    """A rank's block tables on the device.

    `update` sends the entries that were added to the BlockTables since the last one, in one transfer. On a CPU both
    share the same memory.

    Attributes:
        ids: [G R, M] int32 on the device, the tables of R rows in each of G cache groups.
    """

    def __init__(self, tables: BlockTables, device: torch.device) -> None:
        self._tables = tables
        self._shared = device.type == "cpu"
        self.ids = torch.from_numpy(tables.ids) if self._shared else torch.from_numpy(tables.ids).to(device)
        self._num_sent = tables.lens.copy()

    def read(self, tables: Tensor, width: int, first_columns: Tensor) -> Tensor:
        """Return a copy of the first `width` entries of tables, [N, width].

        Entries before a table's first column become the one there: the blocks behind a window may be of other
        sequences by now. A kernel that reads whole tiles and masks what it read would spread their NaN.

        Args:
            tables: [N] int32, numbers of tables.
            first_columns: [N, 1] int64; [0] for a model without windows.
        """
        ids = self.ids[:, :width].index_select(0, tables)
        if first_columns.numel() == 0:
            return ids
        columns = torch.arange(width, device=ids.device).expand_as(ids)
        return ids.gather(1, torch.maximum(columns, first_columns))

    def release(self, rows: IntArray) -> None:
        """Forget the entries of rows that have been sent."""
        self._num_sent[self._tables.tables_of(rows)] = 0

    def trim(self, rows: IntArray, lens: IntArray) -> None:
        """Forget the entries of rows beyond `lens`."""
        tables, lens = self._tables.tables_of(rows), np.tile(lens, self._tables.num_groups)
        self._num_sent[tables] = np.minimum(self._num_sent[tables], lens)

    def update(self) -> None:
        """Send the entries appended since the last update; the host does not wait for the transfer."""
        if self._shared:
            return
        added = self._tables.lens - self._num_sent
        rows = np.repeat(np.arange(len(added)), added)
        if rows.size == 0:
            return
        ends = np.cumsum(added)
        index = np.arange(rows.size) + np.repeat(self._tables.lens - ends, added)
        entries = np.stack((rows, index, self._tables.ids[rows, index]), axis=1)
        update_block_tables(self.ids, to_device(entries, self.ids.device, torch.int32))
        self._num_sent[:] = self._tables.lens
