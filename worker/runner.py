"""ModelRunner: one rank's weights, cache and rows, and the step that it executes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.decode_splits import INVARIANT_ITEM_LEN
from ..kernels.native.memory import keep_freed_memory
from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig
from ..proto.errors import ConfigError, RankFailed, in_one_line
from ..proto.step import Logprobs, PromptLogprobs, StepPlan, StepResult
from .attention import AttentionInputs
from .batch import Batch, gather_batch
from .comm.communicator import Communicator
from .comm.torch_distributed import device_of
from .device_rows import DeviceRows
from .graphs import CudaGraphs, DecodeGraphs, DecodeInputs, GraphBackend, graph_sizes
from .memory.cache_engine import DEFAULT_CPU_KV_BYTES, CacheEngine, bytes_per_block
from .memory.host_memory import available_bytes
from .memory.host_to_device import to_device
from .memory.kv_budget import profile_kv_bytes
from .models.load_context import LoadContext
from .models.loader import Model, load_model
from .sampling.prompt_logprobs import compute_prompt_logprobs
from .sampling.sampler import SampledLogprobs, Sampler
from .weights.checkpoint import Checkpoint, ProgressCallback
from .weights.quantization import read_quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What recorded decode steps share besides their logits: the activations of the largest, with room to spare.
GRAPH_POOL_BYTES = 256 << 20
# What a step on a CPU has freed and the next may have: the activations of thousands of tokens.
KEPT_BYTES = 512 << 20
_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")


class ModelRunner:
    """Executes plans on one rank.

    Args:
        config: resolved; its tensor_parallel_size is comm.size.
        comm: this rank's place among the others.
        on_progress: called with bytes read and bytes in all while weights load.
        graph_backend: what records decode steps; None: CUDA graphs on a GPU, nothing on a CPU.

    Attributes:
        stage: what it is doing: ``idle``, ``apply``, ``forward``, ``sample`` or ``record``. Other threads may read
            it; after a failure it stays where that happened.

    Raises:
        ConfigError: the model or its parallel size is not supported.
        ModelLoadError: the weights cannot be read.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        on_progress: ProgressCallback | None = None,
        graph_backend: GraphBackend | None = None,
    ) -> None:
        self.stage = "idle"
        self._config = config
        self._comm = comm
        self._device = device_of(config.parallel.device)
        self._dtype = DTYPES[config.model.dtype]
        if self._device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_rank)
        with torch.inference_mode():
            self._model = self._load_model(on_progress)
            self._sampler = Sampler(self._model.head.shard, comm, self._device)
            self._rows = DeviceRows(config, self._model.head.shard, self._device)
        if self._device.type == "cpu":
            keep_freed_memory(KEPT_BYTES)
        self._cache: CacheEngine | None = None
        self._graph_backend = graph_backend
        self._graphs: DecodeGraphs | None = None

    def _load_model(self, on_progress: ProgressCallback | None) -> Model:
        config, comm = self._config, self._comm
        with closing(Checkpoint(config.model.path, on_progress, comm.size)) as checkpoint:
            load = LoadContext(
                checkpoint,
                comm,
                self._dtype,
                self._device,
                read_quantization(config.model),
                config.parallel.fused_all_reduce,
            )
            with _memory_for(f"{config.model.name} does not fit into the memory of rank {comm.rank}"):
                return load_model(load, config.model)

    def num_blocks_that_fit(self) -> int:
        """Blocks that this rank's KV memory holds, the scratch block included."""
        cache = self._config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        num_bytes = cache.memory_bytes
        if num_bytes is None:
            num_bytes = DEFAULT_CPU_KV_BYTES if self._device.type == "cpu" else self._free_gpu_bytes()
        return num_bytes // bytes_per_block(self._config, self._dtype)

    def allocate_cache(self, num_blocks: int) -> float:
        """Takes the KV memory, on the device and the host; once, before the first step.

        Returns:
            Blocks a second that move between the two, each way; 0 without a host tier.

        Raises:
            ConfigError: there is not so much memory, or the model proves not to be fit for it.
        """
        device_bytes, host_bytes = (
            count * bytes_per_block(self._config, self._dtype)
            for count in (num_blocks, self._config.cache.num_host_blocks)
        )
        on_host = f" and {host_bytes / 2**30:.2f} GiB for what is swapped" if host_bytes else ""
        failure = (
            f"rank {self._comm.rank} cannot allocate {device_bytes / 2**30:.2f} GiB of KV memory{on_host}"
        )
        _check_host_memory(host_bytes + (device_bytes if self._device.type == "cpu" else 0), failure)
        with _memory_for(failure):
            self._cache = CacheEngine(self._config, num_blocks, self._dtype, self._device)
        with torch.inference_mode():
            self._model.selfcheck()
            self._graphs = self._make_graphs()
        return self._cache.measure_swap_rate()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Does one step. Plans are executed in the order in which the scheduler made them.

        Raises:
            RankFailed: the plan does not fit this rank's state (said before any collective), a collective failed,
                or anything else went wrong; the rank is of no use afterwards.
        """
        times: dict[str, float] = {}
        try:
            with self._staged("apply", times):
                batch = self._apply(plan)
            result = StepResult(plan.step_id, plan.epoch, self._comm.rank, stage_times=times)
            return result if batch is None else self._compute(batch, result)
        except RankFailed:
            raise
        except Exception as error:
            raise self._failure(plan, in_one_line(error)) from error

    @torch.inference_mode()
    def after_step(self) -> None:
        """Does what may wait until the answer to a step is out; every rank after every step."""
        if self._graphs is not None:
            with self._staged("record", {}):
                self._graphs.after_step()

    def close(self) -> None:
        """Leaves the group. Safe to call twice."""
        self._comm.close()

    @contextmanager
    def _staged(self, stage: str, times: dict[str, float]) -> Iterator[None]:
        """Names and times a part of a step. On a GPU that is the time to launch it, except where it waits."""
        self.stage = stage
        started = time.perf_counter()
        yield
        times[stage] = time.perf_counter() - started
        self.stage = "idle"

    def _apply(self, plan: StepPlan) -> Batch | None:
        self._rows.apply(plan)
        digest = self._rows.tables.digest
        if digest != plan.digest:
            reason = f"its block tables have digest {digest:016x}, the scheduler's {plan.digest:016x}"
            raise self._failure(plan, reason)
        if len(plan.swap_out):
            self._kv.swap_out(torch.from_numpy(plan.swap_out.astype(np.int64)))
        if len(plan.swap_in):
            self._kv.swap_in(torch.from_numpy(plan.swap_in.astype(np.int64)))
        if len(plan.copies):
            self._kv.copy(to_device(plan.copies, self._device, torch.int64))
        return gather_batch(self._rows, plan, self._config.cache.block_size, self._item_len)

    def _compute(self, batch: Batch, result: StepResult) -> StepResult:
        with self._staged("forward", result.stage_times):
            self._kv.wait_for_swaps()
            logits = None if self._graphs is None else self._graphs.replay(batch)
            if logits is None:
                logits, scores = self._forward(batch)
                result = replace(result, prompt_logprobs=scores)
            self._rows.mark_computed(batch.rows, batch.lens)
            if logits is None:
                return result
        with self._staged("sample", result.stage_times):
            return self._sample(batch.sampled_rows, logits, result)

    def _forward(self, batch: Batch) -> tuple[Tensor | None, PromptLogprobs | None]:
        """Logits of the sampled rows, None if there are none, and what is asked of prompts, on rank 0."""
        hidden = self._model.forward(batch.token_ids, batch.positions, self._kv.layers, batch.attention)
        scores = None
        if batch.scored is not None:
            found = compute_prompt_logprobs(
                batch.scored, hidden, self._rows.token_ids, self._model.logits, self._sampler
            )
            scores = found if self._comm.rank == 0 else None
        if batch.sampled_rows.size == 0:
            return None, scores
        if batch.sampled_index is not None:
            hidden = hidden.index_select(0, batch.sampled_index)
        return self._model.logits(hidden), scores

    def _sample(self, rows: IntArray, logits: Tensor, result: StepResult) -> StepResult:
        token_ids, logprobs = self._sampler.sample(
            logits, self._rows.sampling, rows, self._rows.lens[rows], self._rows.logits_processors
        )
        self._rows.append(rows, token_ids)
        if self._comm.rank != 0:
            return result
        return replace(result, token_ids=token_ids.cpu().numpy(), logprobs=_to_host(logprobs))

    def _make_graphs(self) -> DecodeGraphs | None:
        if not self._records_graphs:
            return None
        return DecodeGraphs(
            self._compute_decode,
            self._config.scheduler.max_num_seqs,
            self._config.max_blocks_per_seq,
            self._config.cache.block_size,
            self._device,
            self._graph_backend or CudaGraphs(self._device),
            self._item_len,
        )

    def _compute_decode(self, inputs: DecodeInputs) -> Tensor:
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv.layers, inputs.attention)
        return self._model.logits(hidden)

    @property
    def _records_graphs(self) -> bool:
        possible = self._device.type == "cuda" or self._graph_backend is not None
        return possible and self._config.parallel.cuda_graphs and self._model.supports_graphs

    @property
    def _item_len(self) -> int | None:
        return INVARIANT_ITEM_LEN if self._config.parallel.batch_invariant else None

    @property
    def _kv(self) -> CacheEngine:
        assert self._cache is not None, "allocate_cache comes before the first step"
        return self._cache

    def _failure(self, plan: StepPlan, reason: str) -> RankFailed:
        return RankFailed(self._comm.rank, reason, plan.step_id, self.stage)

    def _free_gpu_bytes(self) -> int:
        """What the largest possible step and the graphs leave of this process's share of the GPU."""
        share = self._config.cache.gpu_memory_utilization
        left = profile_kv_bytes(self._device, share, self._profile_run)
        if not self._records_graphs:
            return left
        sizes = graph_sizes(self._config.scheduler.max_num_seqs)
        logits_bytes = sum(sizes) * self._model.head.shard.padded_len * torch.float32.itemsize
        return max(0, left - logits_bytes - GRAPH_POOL_BYTES)

    @torch.inference_mode()
    def _profile_run(self) -> None:
        """A forward pass of as many tokens and sampled rows as a step may have, all in the scratch block."""
        scheduler, block_size = self._config.scheduler, self._config.cache.block_size
        num_seqs = -(-scheduler.max_num_batched_tokens // block_size)
        cache = CacheEngine(self._config, 1, self._dtype, self._device)
        position = torch.arange(block_size, device=self._device).repeat(num_seqs)
        inputs = AttentionInputs(
            num_decodes=0,
            slot_mapping=position,
            block_tables=torch.zeros(num_seqs, 1, dtype=torch.int32, device=self._device),
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device) * block_size,
            seq_lens=torch.full((num_seqs,), block_size, dtype=torch.int32, device=self._device),
        )
        hidden = self._model.forward(torch.zeros_like(position), position, cache.layers, inputs)
        rows = np.arange(scheduler.max_num_seqs, dtype=np.int32)
        logits = self._model.logits(hidden[to_device(rows % len(position), self._device, torch.int64)])
        # A row drawn from the whole vocabulary has the largest intermediate tensors.
        self._sampler.sample(logits, self._rows.sampling, rows, rows)


def _check_host_memory(num_bytes: int, failure: str) -> None:
    """A system that promises more than it has would end some process later, without a word."""
    left = available_bytes()
    if left is not None and num_bytes > left:
        raise ConfigError(
            f"{failure}: this host has {left / 2**30:.2f} GiB left; lower kv_cache_memory, num_kv_blocks or "
            "num_host_kv_blocks"
        )


@contextmanager
def _memory_for(failure: str) -> Iterator[None]:
    """Raises ConfigError with these words where there is not enough memory, whoever says so."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # Torch's words on a CPU, CUDA's for pinned memory, and the system's for pages.
        if known or any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise ConfigError(failure) from error
        raise


def _to_host(logprobs: SampledLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        logprobs.index,
        logprobs.chosen.cpu().numpy(),
        logprobs.top_ids.int().cpu().numpy(),
        logprobs.top.cpu().numpy(),
    )
