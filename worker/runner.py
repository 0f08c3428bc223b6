"""ModelRunner: one rank's weights, cache and rows, and the step that it executes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.decode_splits import INVARIANT_ITEM_LEN
from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig
from ..proto.errors import ConfigError, RankFailed
from ..proto.step import Logprobs, StepPlan, StepResult
from .attention import AttentionInputs
from .batch import Batch, gather_batch
from .cache_engine import DEFAULT_CPU_KV_BYTES, CacheEngine, bytes_per_block
from .layers import LoadContext
from .models.decoder import Decoder
from .models.registry import check_supported
from .parallel import Communicator, device_of
from .rows import Rows, to_device
from .sampler import SampledLogprobs, Sampler
from .weights import Checkpoint, ProgressCallback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Executes plans on one rank.

    Args:
        config: resolved; its tensor_parallel_size is comm.size.
        comm: this rank's place among the others.
        on_progress: called with bytes read and bytes in all while weights load.

    Attributes:
        stage: what it is doing: ``idle``, ``apply``, ``forward`` or ``sample``. Other threads may read it; after
            a failure it stays where that happened.

    Raises:
        ConfigError: the model or its parallel size is not supported.
        ModelLoadError: the weights cannot be read.
    """

    def __init__(
        self, config: EngineConfig, comm: Communicator, on_progress: ProgressCallback | None = None
    ) -> None:
        spec = check_supported(config.model, comm.size)
        self.stage = "idle"
        self._config = config
        self._comm = comm
        self._device = device_of(config.parallel.device)
        self._dtype = DTYPES[config.model.dtype]
        if self._device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_rank)
        with torch.inference_mode():
            load = LoadContext(Checkpoint(config.model.path, on_progress), comm, self._dtype, self._device)
            try:
                self._model = Decoder(load, spec, config.model.max_model_len)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ConfigError(
                    f"{config.model.name} does not fit into the memory of rank {comm.rank}"
                ) from error
            self._sampler = Sampler(self._model.head.shard, comm, self._device)
            self._rows = Rows(config, self._device)
        self._cache: CacheEngine | None = None

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
            ConfigError: there is not so much memory.
        """
        try:
            self._cache = CacheEngine(self._config, num_blocks, self._dtype, self._device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            wanted = num_blocks * bytes_per_block(self._config, self._dtype) / 2**30
            raise ConfigError(
                f"rank {self._comm.rank} cannot allocate {wanted:.2f} GiB of KV memory"
            ) from error
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
            raise self._failure(plan, f"{type(error).__name__}: {error}") from error

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
        item_len = INVARIANT_ITEM_LEN if self._config.parallel.batch_invariant else None
        return gather_batch(self._rows, plan, self._config.cache.block_size, item_len)

    def _compute(self, batch: Batch, result: StepResult) -> StepResult:
        with self._staged("forward", result.stage_times):
            hidden = self._model.forward(batch.token_ids, batch.positions, self._kv.layers, batch.attention)
            self._rows.mark_computed(batch.rows, batch.lens)
            if batch.sampled_rows.size == 0:
                return result
            logits = self._model.logits(hidden[batch.sampled_index])
        with self._staged("sample", result.stage_times):
            return self._sample(batch.sampled_rows, logits, result)

    def _sample(self, rows: IntArray, logits: Tensor, result: StepResult) -> StepResult:
        token_ids, logprobs = self._sampler.sample(logits, self._rows.sampling, rows, self._rows.lens[rows])
        self._rows.append(rows, token_ids)
        if self._comm.rank != 0:
            return result
        return replace(result, token_ids=token_ids.cpu().numpy(), logprobs=_to_host(logprobs))

    @property
    def _kv(self) -> CacheEngine:
        assert self._cache is not None, "allocate_cache comes before the first step"
        return self._cache

    def _failure(self, plan: StepPlan, reason: str) -> RankFailed:
        return RankFailed(self._comm.rank, reason, plan.step_id, self.stage)

    @torch.inference_mode()
    def _free_gpu_bytes(self) -> int:
        """What the largest possible step leaves of this process's share of the GPU."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run_largest_step()
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        taken_by_others = total - free - torch.cuda.memory_reserved(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        return max(0, int(total * self._config.cache.gpu_memory_utilization) - peak - taken_by_others)

    def _run_largest_step(self) -> None:
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


def _to_host(logprobs: SampledLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        logprobs.index,
        logprobs.chosen.cpu().numpy(),
        logprobs.top_ids.int().cpu().numpy(),
        logprobs.top.cpu().numpy(),
    )
