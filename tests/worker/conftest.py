"""Minimal scheduler for tests of the ModelRunner: plans greedily, in arrival order, without preemption.

Some tests run Triton kernels. triton_device is imported first, because the first import of Triton selects the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton_device  # noqa: F401
from thread_group import ThreadGroup, ThreadLink

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_config import describe_model
from quire.cluster.config.resolve import engine_config as combine
from quire.proto.block_tables import BlockTables
from quire.proto.config import EngineConfig
from quire.proto.lora import NO_SLOT
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.step import EncoderInput, NewSequence, RowSampling, StepPlan, StepResult
from quire.worker.comm.communicator import Communicator, SingleRank
from quire.worker.comm.pipeline import Pipeline
from quire.worker.graphs.graphs import GraphBackend
from quire.worker.rank.runner import ModelRunner


def make_config(folder: Path, tp: int = 1, **settings: Any) -> EngineConfig:
    """Return an EngineConfig like that of `resolve`, for a CPU.

    Settings: dtype (float32 by default), block_size, num_blocks, max_model_len, max_num_seqs, memory_bytes, kv_dtype,
    device, quantization, cuda_graphs, max_num_batched_tokens, num_host_blocks, speculative, lora, pooling,
    enable_expert_parallel, enable_dp_attention, batch_invariant, num_state_slots, num_host_state_slots,
    all2all_backend, enable_eplb, num_redundant_experts, eplb_step_interval, attention_backend, language_model_only,
    pp, dp_attention_size, mm_encoder_tp_mode, kv_transfer,
        kv_transport.
    """
    model = replace(
        describe_model(folder, folder.name),
        dtype=settings.get("dtype", "float32"),
        max_model_len=settings.get("max_model_len", 256),
        quantization=settings.get("quantization"),
        pooling=settings.get("pooling"),
    )
    if settings.get("language_model_only"):
        model = replace(model, vision=None)
    options = EngineOptions(
        str(folder),
        tensor_parallel_size=tp,
        pipeline_parallel_size=settings.get("pp", 1),
        block_size=settings.get("block_size", 16),
        num_kv_blocks=settings.get("num_blocks"),
        kv_cache_memory=settings.get("memory_bytes"),
        kv_cache_dtype=settings.get("kv_dtype", "auto"),
        max_num_seqs=settings.get("max_num_seqs", 8),
        max_num_batched_tokens=settings.get("max_num_batched_tokens", 2048),
        num_host_kv_blocks=settings.get("num_host_blocks", 0),
        num_state_slots=settings.get("num_state_slots"),
        num_host_state_slots=settings.get("num_host_state_slots", 0),
        kv_transfer=settings.get("kv_transfer", False),
        kv_transport=settings.get("kv_transport", "auto"),
        cuda_graphs=settings.get("cuda_graphs", True),
        enable_expert_parallel=settings.get("enable_expert_parallel", False),
        enable_dp_attention=settings.get("enable_dp_attention", False),
        dp_attention_size=settings.get("dp_attention_size"),
        all2all_backend=settings.get("all2all_backend", "all_reduce"),
        enable_eplb=settings.get("enable_eplb", False),
        num_redundant_experts=settings.get("num_redundant_experts", 0),
        eplb_step_interval=settings.get("eplb_step_interval", 3000),
        batch_invariant=settings.get("batch_invariant"),
        attention_backend=settings.get("attention_backend", "triton"),
        mm_encoder_tp_mode=settings.get("mm_encoder_tp_mode", "weights"),
    )
    config = combine(options, model, device=settings.get("device", "cpu"))
    return replace(config, speculative=settings.get("speculative"), lora=settings.get("lora"))


@dataclass
class Planned:
    """A sequence and its state in the Planner."""

    prompt: list[int]
    max_tokens: int
    sampling: RowSampling
    arrival: int = 0
    lora_slot: int = NO_SLOT
    row: int = -1
    num_computed: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.max_tokens


class Planner:
    """Makes plans and applies results; rows in arrival order, shuffled free blocks, no prefix caching.

    Blocks behind a window are given to the next sequence that needs one. Each row has a state slot of its own.

    Attributes:
        freed: blocks that became free since the last plan.

    Args:
        chunk_len: most prompt tokens that a sequence computes per step.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, chunk_len: int, seed: int = 0) -> None:
        self._groups = config.cache_layout.groups
        num_rows = config.scheduler.max_num_seqs
        self.tables = BlockTables(num_rows, config.max_blocks_per_seq, len(self._groups))
        # table |-> index of its first block that is not released.
        self._first_live = [0] * (len(self._groups) * num_rows)
        self._block_size = config.cache.block_size
        self._chunk_len = chunk_len
        self._has_states = config.model.has_states
        ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
        self._free_blocks: list[int] = ids.tolist()
        self.freed: list[int] = []
        self._free_rows = list(range(num_rows))[::-1]
        self._released: list[int] = []
        self.running: list[Planned] = []
        self.step_id = 0

    def plan(self, arriving: list[Planned]) -> StepPlan:
        """Plan the next step; admit sequences of `arriving` while rows are free."""
        self.step_id += 1
        self._free_blocks += self.freed
        self.freed = []
        released = _ints(self._released)
        self.tables.release(released)
        self._released = []
        new = [self._admit(arriving.pop(0)) for _ in range(min(len(arriving), len(self._free_rows)))]
        appended: list[tuple[int, int]] = []
        chunks: list[tuple[int, int]] = []
        for sequence in self.running:
            if sequence.generated:
                length = 1
            else:
                length = min(self._chunk_len, len(sequence.prompt) - sequence.num_computed)
                chunks.append((sequence.row, length))
            sequence.num_computed += length
            missing = -(-sequence.num_computed // self._block_size) - self.tables.lens[sequence.row]
            tables = [table for table in self._tables_of(sequence) for _ in range(missing)]
            extra = [(table, self._free_blocks.pop()) for table in tables]
            self.tables.append(_ints(tables), _ints([block for _, block in extra]))
            appended += extra
        chunks.sort()
        return StepPlan(
            step_id=self.step_id,
            epoch=1,
            digest=self.tables.digest,
            released_rows=released,
            new=tuple(new),
            appended_rows=_ints([row for row, _ in appended]),
            appended_ids=_ints([block for _, block in appended]),
            chunk_rows=_ints([row for row, _ in chunks]),
            chunk_lens=_ints([length for _, length in chunks]),
        )

    def apply(self, result: StepResult) -> None:
        assert result.step_id == self.step_id
        sampled = [sequence for sequence in self.running if sequence.num_computed == sequence.num_known]
        sampled.sort(key=lambda sequence: sequence.row)
        assert len(result.token_ids) == len(sampled)
        for sequence, token_id in zip(sampled, result.token_ids.tolist(), strict=True):
            sequence.generated.append(token_id)
        for sequence in self.running:
            self._release_behind_windows(sequence)
        for sequence in [sequence for sequence in self.running if sequence.is_done]:
            self.running.remove(sequence)
            for table in self._tables_of(sequence):
                self.freed += self.tables.row(table)[self._first_live[table] :].tolist()
                self._first_live[table] = 0
            self._released.append(sequence.row)
            self._free_rows.append(sequence.row)

    def _tables_of(self, sequence: Planned) -> list[int]:
        return self.tables.tables_of(_ints([sequence.row])).tolist()

    def _release_behind_windows(self, sequence: Planned) -> None:
        for table, group in zip(self._tables_of(sequence), self._groups, strict=True):
            first = group.first_block(sequence.num_computed, self._block_size)
            self.freed += self.tables.row(table)[self._first_live[table] : first].tolist()
            self._first_live[table] = first

    def _admit(self, sequence: Planned) -> NewSequence:
        sequence.row = self._free_rows.pop()
        self.running.append(sequence)
        prompt = _ints(sequence.prompt)
        state_slot = sequence.row + 1 if self._has_states else 0
        if state_slot:
            self.tables.put_state(sequence.row, state_slot)
        return NewSequence(
            sequence.row,
            self.step_id,
            prompt,
            0,
            _ints([]),
            sequence.sampling,
            sequence.lora_slot,
            state_slot=state_slot,
        )


class Engine:
    """ModelRunners of all ranks, in threads, with a Planner.

    Args:
        num_blocks: 64 for each cache group by default.
        graph_backend: of every runner.
    """

    def __init__(
        self,
        folder: Path,
        tp: int = 1,
        num_blocks: int | None = None,
        graph_backend: GraphBackend | None = None,
        **settings: Any,
    ) -> None:
        if graph_backend is not None:  # as on a GPU
            settings.setdefault("batch_invariant", False)
        self.config = make_config(folder, tp, **settings)
        num_blocks = num_blocks or 64 * len(self.config.cache_layout.groups)
        self.num_blocks = num_blocks
        self.split = ParallelSplit.of(self.config.parallel)
        self._group = ThreadGroup(self.split.num_ranks)
        self.runners = self.on_all(
            lambda own: ModelRunner(self.config, own.tensor, graph_backend=graph_backend, pipeline=own),
            [self._pipeline_of(rank) for rank in range(self.split.num_ranks)],
        )
        self.on_all(lambda runner: runner.allocate_cache(num_blocks), self.runners)

    def _pipeline_of(self, rank: int) -> Pipeline:
        """Return the groups of a rank."""
        split, group = self.split, self._group
        members = split.ranks_of(split.place_of(rank).stage)
        tensor: Communicator = SingleRank() if len(members) == 1 else group.communicator(rank, members)
        sharers = split.sharers_of(rank)
        attention = group.communicator(rank, sharers) if 1 < len(sharers) < split.tensor else None
        if split.pipeline == 1:
            return Pipeline.of_one_stage(tensor, attention)
        link = ThreadLink(group, rank, split)
        return Pipeline(split.stage_of(rank), rank, tensor, group.communicator(rank), link, attention)

    def forget_transfers(self) -> None:
        """Forget what stages have sent each other, as with the connections of a group that is left."""
        self._group.forget_sent()

    def divide_blocks(self, num_blocks: int) -> None:
        """Number the blocks of data-parallel ranks as a scheduler does that knows of fewer than there are."""
        for runner in self.runners:
            if runner.memory.rows.partition is not None:
                runner.memory.rows.partition = replace(runner.memory.rows.partition, num_blocks=num_blocks)

    def on_all(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        """Call the function with each rank's argument, on threads of the ranks; raise the first error.

        One rank is called on this thread.
        """
        if len(arguments) == 1:
            return [function(arguments[0])]
        return self._group.run(function, arguments)

    def step(self, plan: StepPlan) -> StepResult:
        """Encode, decode and execute the plan on every rank; return the result, with all ranks' reports."""
        plan = StepPlan.decode(plan.encode())
        results = self.on_all(lambda runner: runner.execute(plan), self.runners)
        result = results[self.split.result_rank]
        assert all(each.token_ids.size == 0 for each in results if each is not result)
        return replace(
            result,
            lora_reports=tuple(own for each in results for own in each.lora_reports),
            kv_reports=tuple(own for each in results for own in each.kv_reports),
        )

    def take_media(self, image: EncoderInput) -> None:
        """Give an image to every rank."""
        for runner in self.runners:
            runner.take_media(image)

    def generate(
        self, sequences: list[Planned], chunk_len: int = 512, seed: int = 0, record: list[bytes] | None = None
    ) -> list[StepResult]:
        """Run the sequences, each from its arrival step on, until all are done; append the plans to `record`."""
        planner = Planner(self.config, self.num_blocks, chunk_len, seed)
        waiting = sorted(sequences, key=lambda sequence: sequence.arrival)
        arrived: list[Planned] = []
        results: list[StepResult] = []
        plans: list[StepPlan] = []
        while waiting or arrived or planner.running:
            while waiting and waiting[0].arrival <= planner.step_id:
                arrived.append(waiting.pop(0))
            plans.append(planner.plan(arrived))
            results.append(self.step(plans[-1]))
            planner.apply(results[-1])
            self.lose_blocks(planner.freed)
        plans.append(planner.plan([]))  # releases the last rows
        results.append(self.step(plans[-1]))
        if record is not None:
            record += [plan.encode() for plan in plans]
        return results

    def greedy(self, prompts: Sequence[list[int]], num_tokens: int, **how: Any) -> list[list[int]]:
        """Return so many greedy tokens of each prompt; they run together, as `generate` runs them."""
        sequences = [Planned(prompt, num_tokens, RowSampling(temperature=0.0)) for prompt in prompts]
        self.generate(sequences, **how)
        return [sequence.generated for sequence in sequences]

    def lose_blocks(self, block_ids: Sequence[int] | None = None) -> None:
        """Overwrite free blocks, or all, with NaN: nothing may read them before they are written again."""
        for runner in self.runners:
            for part in runner.memory.kv.cache._parts:
                if part.dtype.itemsize > 1:  # of quantized numbers the scales are lost
                    for block_id in range(part.shape[1]) if block_ids is None else block_ids:
                        part[:, block_id].fill_(torch.nan)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self._group.close()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch, so that random numbers do not depend on earlier tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def make_engine() -> Any:
    """`make_engine(folder, tp=1, num_blocks=None, **settings) -> Engine`, closed after the module."""
    engines: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield make
    with pytest.MonkeyPatch.context() as patch:
        # Collects garbage, which took 0.4 s per engine. It is collected after the module.
        patch.setattr("quire.worker.rank.rank_memory.free_unused_memory", lambda device: None)
        for engine in engines:
            engine.close()


@pytest.fixture(scope="session")
def engine_config() -> Callable[..., EngineConfig]:
    """`engine_config(folder, tp=1, **settings) -> EngineConfig`; see make_config."""
    return make_config


@pytest.fixture(scope="session")
def planned() -> type[Planned]:
    return Planned


@pytest.fixture(scope="session")
def thread_group() -> type[ThreadGroup]:
    return ThreadGroup


def _ints(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)
