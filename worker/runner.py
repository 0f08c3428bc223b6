"""ModelRunner: one rank's weights, KV cache and rows, and the execution of steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..kernels.decode_splits import INVARIANT_ITEM_LEN, split_decodes
from ..kernels.dispatch import num_compilations
from ..kernels.flash_attention import FlashAttention, load_flash_attention
from ..kernels.latent_attention import ChunkBounds
from ..kernels.native.instruction_sets import instruction_set
from ..kernels.native.memory import keep_freed_memory
from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig, ModelConfig, SpeculativeConfig
from ..proto.engine_command import Action, EngineCommand
from ..proto.errors import ConfigError, ModelLoadError, RankFailed, first_line, in_one_line
from ..proto.lora import LoraReport
from ..proto.step import RowSampling, StepPlan, StepResult
from .attention import AttentionInputs, LayerCache
from .batch import Batch, gather_batch
from .comm.communicator import Communicator
from .device import compute_device
from .device_rows import DeviceRows
from .graph_backend import CudaGraphs, GraphBackend
from .graph_shapes import decode_shapes, mixed_shapes
from .graphs import GraphInputs, GraphLimits, StepGraphs
from .launched_step import LaunchedStep
from .lora.adapters import RankAdapters
from .lora.layers import LoraLayers
from .memory.allocation import check_host_memory, free_unused_memory, out_of_memory_as
from .memory.cache_engine import DEFAULT_CPU_KV_BYTES, CacheEngine, bytes_per_block
from .memory.device_to_host import HostCopy
from .memory.host_to_device import to_device
from .memory.kv_budget import profile_kv_bytes
from .models.draft_head import load_draft_head
from .models.load_context import LoadContext
from .models.loader import Model, load_model
from .pooling.head import read_head
from .pooling.pooler import Pooler
from .sampling.prompt_logprobs import compute_prompt_logprobs
from .sampling.sampler import Sampler
from .sampling.sampling_table import SamplingTable
from .speculation.draft_model import DraftModelProposer
from .speculation.feature_tap import FeatureTap
from .speculation.head_proposer import HeadProposer
from .speculation.ngram import NgramProposer
from .speculation.proposer import DraftProposer
from .speculation.speculator import Speculator
from .speculation.verification import verify
from .warm_up import warm_up_plans
from .weights.checkpoint import Checkpoint, ProgressCallback
from .weights.node_cache import weights_folder
from .weights.quantization import read_quantization
from .weights.same_layout import check_same_layout

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Freed memory that a CPU process keeps for the next step: activations of thousands of tokens.
KEPT_BYTES = 512 << 20


class ModelRunner:
    """Executes plans on one rank.

    Args:
        config: resolved; its tensor_parallel_size equals comm.size.
        comm: the tensor-parallel group.
        on_progress: called with the bytes read and the total while weights load.
        graph_backend: records steps; None for CUDA graphs on a GPU and no graphs on a CPU.
        device: of the weights and the KV cache; None for the thread's current one. It must be the current device of
            every thread that calls a method (see `on_device`).

    Attributes:
        device: of the weights and the KV cache.
        stage: ``idle``, ``apply``, ``draft``, ``forward``, ``sample`` or ``record``. Other threads may read it. After
            a failure it keeps the stage that failed.

    Raises:
        ConfigError: the model or its tensor_parallel_size is not supported, the weights do not fit into memory, or
            QUIRE_CPU_ISA names an instruction set that the processor lacks.
        ModelLoadError: the weights cannot be read.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        on_progress: ProgressCallback | None = None,
        graph_backend: GraphBackend | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.stage = "idle"
        self._config = config
        self._comm = comm
        self.device = self._device = compute_device(config.parallel.device) if device is None else device
        self._dtype = DTYPES[config.model.dtype]
        if self._device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_rank)
            _check_instruction_set()
        self._attend_chunks = _load_attention(config.parallel.attention_backend)
        lora = config.lora
        self._adapters = None if lora is None else RankAdapters(lora, comm.rank, self._dtype, self._device)
        with torch.inference_mode():
            self._pooler: Pooler | None = None
            self._model_in_use = config.model  # with the path of the weights
            layers = None if self._adapters is None else self._adapters.layers
            self._model = self._load_model(config.model, on_progress, layers)
            self._sampler = Sampler(self._model.head.shard, comm, self._device)
            self._rows = DeviceRows(config, self._model.head.shard, self._device)
            self._tap: FeatureTap | None = None
            self._speculator: Speculator | None = None
            if config.speculative is not None:
                self._speculator = Speculator(self._rows, self._make_proposer(config.speculative))
        if self._device.type == "cpu":
            keep_freed_memory(KEPT_BYTES)
        self._cache: CacheEngine | None = None  # before `allocate_cache`, and in sleep
        self._num_blocks_asleep = 0
        self._graph_backend = graph_backend
        self._graphs: StepGraphs | None = None
        self._is_closed = False
        self._num_compilations = 0  # when the rank was ready

    def _make_proposer(self, speculative: SpeculativeConfig) -> DraftProposer:
        if speculative.draft is None:
            return NgramProposer(speculative, self._rows)
        block_size = self._config.cache.block_size
        if speculative.method == "draft_model":
            model = self._load_model(speculative.draft, None)
            return DraftModelProposer(self._rows, model, self._sampler, self._draft_layers, block_size)
        with self._load_context(speculative.draft, None) as load:
            head = load_draft_head(load, speculative, self._model)
        self._tap = FeatureTap(self._model, head.aux_layers, self._max_graph_tokens)
        return HeadProposer(self._rows, head, self._sampler, self._draft_layers, block_size)

    def _draft_layers(self) -> list[LayerCache]:
        return self._kv_cache.draft_layers

    def _load_model(
        self, model: ModelConfig, on_progress: ProgressCallback | None, lora: LoraLayers | None = None
    ) -> Model:
        with self._load_context(model, on_progress, lora) as load:
            if model.pooling is not None:
                head = read_head(load, model, model.pooling)
                self._pooler = Pooler(model.pooling, head, self._config.scheduler.max_num_seqs, self._device)
            return load_model(load, model)

    @contextmanager
    def _load_context(
        self, model: ModelConfig, on_progress: ProgressCallback | None, lora: LoraLayers | None = None
    ) -> Iterator[LoadContext]:
        """Open a model's checkpoint. Raises ConfigError if what the body loads does not fit into memory."""
        config, comm = self._config, self._comm
        folder = weights_folder(model.path)
        with closing(Checkpoint(folder, on_progress, comm.size)) as checkpoint:
            load = LoadContext(
                checkpoint,
                comm,
                self._dtype,
                self._device,
                read_quantization(model),
                config.parallel.fused_all_reduce,
                lora,
            )
            with out_of_memory_as(f"{model.name} does not fit into the memory of rank {comm.rank}"):
                yield load

    def num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks that fit into this rank's memory, including the scratch block."""
        cache = self._config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        num_bytes = cache.memory_bytes
        if num_bytes is None:
            num_bytes = DEFAULT_CPU_KV_BYTES if self._device.type == "cpu" else self._gpu_kv_bytes()
        return num_bytes // bytes_per_block(self._config, self._dtype)

    def allocate_cache(self, num_blocks: int, *, touches_pages: bool = True) -> float:
        """Allocate the KV cache on the device and the host; called once, before the first step.

        Args:
            touches_pages: on a CPU, write the whole memory now, so that no step does so for the first time.

        Returns:
            blocks/s that swaps move between the two, each way; 0 without a host tier.

        Raises:
            ConfigError: there is not enough memory, or the model fails its self-check.
        """
        device_bytes, host_bytes = (
            count * bytes_per_block(self._config, self._dtype)
            for count in (num_blocks, self._config.cache.num_host_blocks)
        )
        on_host = f" and {host_bytes / 2**30:.2f} GiB for swapped blocks" if host_bytes else ""
        failure = (
            f"rank {self._comm.rank} cannot allocate {device_bytes / 2**30:.2f} GiB of KV memory{on_host}"
        )
        check_host_memory(host_bytes + (device_bytes if self._device.type == "cpu" else 0), failure)
        with out_of_memory_as(failure):
            self._cache = CacheEngine(
                self._config,
                num_blocks,
                self._config.cache.num_host_blocks,
                self._dtype,
                self._device,
                self._attend_chunks,
                touches_pages=touches_pages,
            )
        self._prepare(num_blocks)
        return self._cache.measure_swap_rate()

    def reset(self) -> None:
        """Empty all rows after the group was joined anew, and prepare for steps as `allocate_cache` does.

        The weights and the memory of the KV cache stay; the content of the KV cache is void. A rank that sleeps has
        neither, and sleeps on.
        """
        self.stage = "idle"
        self._clear_rows()
        if self._cache is None:
            return
        if self._adapters is not None:
            self._adapters.clear()
        self._graphs = None  # graphs hold the collectives of the group that was left
        free_unused_memory(self._device)
        self._prepare(self._cache.num_blocks)

    def _prepare(self, num_blocks: int) -> None:
        """Check the model, record the graphs and launch every kernel once. The ranks' collectives meet here."""
        with torch.inference_mode():
            self._model.selfcheck()
            self._graphs = self._record_graphs(self._kv_cache)
        if self._device.type != "cpu":
            self._warm_up(num_blocks)
        self._num_compilations = num_compilations()

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one step and wait for its tokens; see `launch`."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch one step; on a CPU execute it. Plans must be launched in the order in which the scheduler made them.

        On a GPU the host does not wait for the device, so that it can launch the next step meanwhile: rows append
        their sampled tokens on the device. Prompt log-probabilities are an exception, for which it waits.

        Raises:
            RankFailed: the plan does not match this rank's state (raised before any collective), a collective failed,
                or any other error occurred; the rank cannot execute further steps.
        """
        times: dict[str, float] = {}
        try:
            if plan.command is not None:
                return self._carry_out(plan, plan.command)
            with self._timed_stage("apply", times):
                self._apply(plan)
            num_drafted = None
            if self._speculator is not None:
                with self._timed_stage("draft", times):
                    self._kv_cache.wait_for_swaps()
                    num_drafted = self._speculator.draft(plan)
                    if self._tap is not None:
                        self._tap.is_open = self._speculator.wants_features
            with self._timed_stage("apply", times):
                batch = self._gather(plan, num_drafted)
            reports = self._take_lora_reports(is_idle=batch is None)
            result = StepResult(
                plan.step_id, plan.epoch, self._comm.rank, stage_times=times, lora_reports=reports
            )
            step = LaunchedStep(result) if batch is None else self._compute(batch, result)
            return self._note_compilations(step)
        except RankFailed:
            raise
        except Exception as error:
            raise self._failure(plan, in_one_line(error)) from error

    # Commands

    def _carry_out(self, plan: StepPlan, command: EngineCommand) -> LaunchedStep:
        """Carry out a command; all rows are empty afterwards. The ranks' collectives meet here."""
        with self._timed_stage("command", {}):
            self._clear_rows()
            error = {
                Action.SLEEP: self._sleep,
                Action.WAKE_UP: self._wake_up,
                Action.UPDATE_WEIGHTS: self._update_weights,
            }[command.action](command)
        return LaunchedStep(StepResult(plan.step_id, plan.epoch, self._comm.rank, command_error=error))

    def _sleep(self, command: EngineCommand) -> str:
        """Free the weights, the KV cache and the graphs."""
        if self._cache is not None:
            self._num_blocks_asleep = self._cache.num_blocks
            self._drop_weights()
            self._cache = None
            free_unused_memory(self._device)
        return ""

    def _wake_up(self, command: EngineCommand) -> str:
        if self._cache is None:
            self._model = self._load_model(self._model_in_use, None)
            self.allocate_cache(self._num_blocks_asleep)
        return ""

    def _update_weights(self, command: EngineCommand) -> str:
        """Load the weights of another directory in place of the present ones; a sleeping rank does so later."""
        error = ""
        try:
            check_same_layout(self._model_in_use.path, command.path)
        except ModelLoadError as problem:
            error = str(problem)
        if not self._all_ranks(not error):
            return error or "another rank cannot read the weights; its node may lack the files"
        self._model_in_use = replace(self._model_in_use, path=command.path)
        if self._cache is not None:
            self._drop_weights()
            free_unused_memory(self._device)
            self._model = self._load_model(self._model_in_use, None)
            self.reset()
        return ""

    def _drop_weights(self) -> None:
        self._graphs = None  # they hold the addresses of weights
        self._pooler = None
        del self._model

    def _clear_rows(self) -> None:
        self._rows.clear()
        if self._speculator is not None:
            self._speculator.clear()

    def close(self) -> None:
        """Leave the group, and free the weights, the KV cache and the graphs. Safe to call twice."""
        self._comm.close()
        if self._is_closed:
            return
        self._is_closed = True
        self._cache = self._graphs = self._graph_backend = None
        self._speculator = None
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None
        vars(self).pop("_model", None)  # absent in sleep
        del self._sampler, self._rows
        free_unused_memory(self._device)

    def _note_compilations(self, step: LaunchedStep) -> LaunchedStep:
        """Report the kernel variants that steps have compiled so far; none is expected."""
        count = num_compilations() - self._num_compilations
        return step if count == 0 else replace(step, launched=replace(step.launched, num_compilations=count))

    @contextmanager
    def _timed_stage(self, stage: str, times: dict[str, float]) -> Iterator[None]:
        """Set the stage and record its duration; on a GPU the time to launch it, except where the host waits."""
        self.stage = stage
        started = time.perf_counter()
        yield
        times[stage] = times.get(stage, 0.0) + time.perf_counter() - started
        self.stage = "idle"

    def _apply(self, plan: StepPlan) -> None:
        if self._adapters is not None:
            self._adapters.apply(plan)
        self._rows.apply(plan)
        digest = self._rows.tables.digest
        if digest != plan.digest:
            reason = f"its block tables have digest {digest:016x}, the scheduler's {plan.digest:016x}"
            raise self._failure(plan, reason)
        if len(plan.swap_out):
            self._kv_cache.swap_out(torch.from_numpy(plan.swap_out.astype(np.int64)))
        if len(plan.swap_in):
            self._kv_cache.swap_in(torch.from_numpy(plan.swap_in.astype(np.int64)))
        if len(plan.copies):
            self._kv_cache.copy(to_device(plan.copies, self._device, torch.int64))

    def _take_lora_reports(self, *, is_idle: bool) -> tuple[LoraReport, ...]:
        if self._adapters is None:
            return ()
        reports = self._adapters.reports(is_idle=is_idle)
        if is_idle:
            self._comm.barrier()  # nothing else would keep rank 0 from running ahead of a rank that still reads
        return reports

    def _gather(self, plan: StepPlan, num_drafted: IntArray | None) -> Batch | None:
        find_graph = None if self._graphs is None else self._graphs.find
        block_size = self._config.cache.block_size
        return gather_batch(self._rows, plan, block_size, self._fixed_item_len, find_graph, num_drafted)

    def _compute(self, batch: Batch, result: StepResult) -> LaunchedStep:
        with self._timed_stage("forward", result.stage_times):
            self._kv_cache.wait_for_swaps()
            if self._adapters is not None:
                self._adapters.begin_step(batch.lora)
            replayed = None if self._graphs is None else self._graphs.find_for(batch)
            logits = None if self._graphs is None else self._graphs.replay(batch)
            step = LaunchedStep(result)
            if logits is None:
                logits, step = self._forward(batch, result)
            self._rows.mark_computed(batch.rows, batch.lens)
        if logits is not None and batch.sampled_rows.size:
            with self._timed_stage("sample", result.stage_times):
                step = self._sample(batch, logits, step)
        if self._tap is not None and self._speculator is not None:
            with self._timed_stage("draft", result.stage_times):
                self._speculator.record(
                    batch, self._tap.take(batch, None if replayed is None else replayed.num_decodes)
                )
        return step

    def _forward(self, batch: Batch, result: StepResult) -> tuple[Tensor | None, LaunchedStep]:
        """Return the logits of the sampled rows, None if no row samples, and rank 0's results of the prompts."""
        run = self._model.forward if self._tap is None else self._tap.forward
        hidden = run(batch.token_ids, batch.positions, self._kv_cache.layers, batch.attention)
        is_first = self._comm.rank == 0
        vectors = None
        if batch.pooled is not None and is_first:  # every rank has all hidden states
            assert self._pooler is not None, "the model has no pooling"
            vectors = self._pooler.pool(batch.pooled, hidden)
        if batch.scored is not None:
            scores = compute_prompt_logprobs(
                batch.scored, hidden, self._rows.token_ids, self._model.logits, self._sampler
            )
            result = replace(result, prompt_logprobs=scores) if is_first else result
        step = LaunchedStep(result, vectors=vectors)
        if batch.sampled_rows.size == 0:
            return None, step
        if batch.sampled_index is not None:
            hidden = hidden.index_select(0, batch.sampled_index)
        return self._model.logits(hidden), step

    def _sample(self, batch: Batch, logits: Tensor, step: LaunchedStep) -> LaunchedStep:
        rows, positions = batch.sampled_rows, batch.sampled_positions
        token_ids, logprobs = self._sampler.sample(
            logits, self._rows.sampling, rows, positions, self._rows.logits_processors
        )
        if batch.has_drafts:
            verdict = verify(rows, self._rows.equals_known(rows, positions, token_ids))
            rows, positions = rows[verdict.kept], positions[verdict.kept]
            token_ids = token_ids[to_device(verdict.kept, self._device, torch.int64)]
            logprobs = None if logprobs is None else logprobs.select(verdict.kept)
            result = step.launched
            result = replace(result, token_counts=verdict.token_counts, num_drafted=verdict.num_drafted)
            step = replace(step, launched=result)
        self._rows.append(rows, positions, token_ids)
        if self._comm.rank != 0:
            return step
        columns = [] if logprobs is None else logprobs.columns()
        return replace(step, copied=HostCopy([token_ids, *columns]), logprobs=logprobs)

    def _record_graphs(self, cache: CacheEngine) -> StepGraphs | None:
        """Record steps of every recorded shape on this cache. Returns None if graphs are off."""
        if not self._uses_graphs:
            return None

        def compute(inputs: GraphInputs) -> Tensor:
            step = inputs.token_ids, inputs.positions, cache.layers, inputs.attention
            hidden = self._model.forward(*step) if self._tap is None else self._tap.record(*step)
            if inputs.sampled_index is not None:
                hidden = hidden.index_select(0, inputs.sampled_index)
            return self._model.logits(hidden)

        config = self._config
        graphs = StepGraphs(
            compute,
            GraphLimits(
                config.scheduler.max_num_seqs,
                config.scheduler.max_num_batched_tokens,
                config.max_blocks_per_seq,
                config.max_blocks_per_seq * config.cache.block_size,
            ),
            self._device,
            self._graph_backend or CudaGraphs(self._device),
            self._all_ranks,
            self._fixed_item_len,
        )
        self.stage = "record"
        graphs.record_all()
        self.stage = "idle"
        return graphs

    def _all_ranks(self, is_true: bool) -> bool:
        """Return whether the argument is true on all ranks, which call this together."""
        own = torch.tensor([is_true], dtype=torch.int32, device=self._device)
        return bool(self._comm.all_gather(own).all())

    def _warm_up(self, num_blocks: int) -> None:
        """Launch every kernel variant, so that Triton compiles none while requests run."""
        started, before = time.perf_counter(), num_compilations()
        for plan in warm_up_plans(self._config, num_blocks):
            self.launch(plan).result()
        seconds = time.perf_counter() - started
        _log.info("compiled or loaded %d kernel variants in %.2f s", num_compilations() - before, seconds)

    @property
    def _uses_graphs(self) -> bool:
        is_available = self._device.type == "cuda" or self._graph_backend is not None
        is_wanted = self._config.parallel.cuda_graphs and self._config.model.generates
        return is_available and is_wanted and self._model.supports_graphs

    @property
    def _max_graph_tokens(self) -> int:
        limits = self._config.scheduler
        shapes = [
            *decode_shapes(limits.max_num_seqs),
            *mixed_shapes(limits.max_num_seqs, limits.max_num_batched_tokens),
        ]
        return max(shape.num_tokens for shape in shapes)

    @property
    def _fixed_item_len(self) -> int | None:
        return INVARIANT_ITEM_LEN if self._config.parallel.batch_invariant else None

    @property
    def _kv_cache(self) -> CacheEngine:
        assert self._cache is not None, "allocate_cache must be called before the first step"
        return self._cache

    def _failure(self, plan: StepPlan, reason: str) -> RankFailed:
        return RankFailed(self._comm.rank, reason, plan.step_id, self.stage, is_step_error=True)

    def _gpu_kv_bytes(self) -> int:
        """Return the GPU memory that the largest step and the graphs leave for the KV cache."""
        utilization = self._config.cache.gpu_memory_utilization
        cache = self._make_scratch_cache()
        num_bytes = profile_kv_bytes(
            self._device, utilization, lambda: self._profile_run(cache), lambda: self._profile_graphs(cache)
        )
        return max(0, num_bytes - self._model.reserved_bytes)

    def _make_scratch_cache(self) -> CacheEngine:
        """Return a cache of the scratch block alone, for profiling."""
        return CacheEngine(self._config, 1, 0, self._dtype, self._device, self._attend_chunks)

    @torch.inference_mode()
    def _profile_graphs(self, cache: CacheEngine) -> object:
        """Record all graphs, to measure their memory; they are recorded again on the whole cache."""
        return self._record_graphs(cache)

    @torch.inference_mode()
    def _profile_run(self, cache: CacheEngine) -> None:
        """Run the steps that need most memory, with all rows in the scratch block: of prompts, and of decodes."""
        hidden = self._profile_prompts(cache)
        if not self._config.model.generates:
            return
        rows = np.arange(self._config.scheduler.max_num_seqs, dtype=np.int32)
        logits = self._model.logits(hidden[to_device(rows % len(hidden), self._device, torch.int64)])
        # Sampling from the whole vocabulary has the largest intermediate tensors, and truncated sampling of several
        # ranks, which gather the logits.
        truncated = SamplingTable(len(rows), self._config.model.vocab_size)
        for row in rows:
            truncated.put(int(row), RowSampling(top_k=2, top_p=0.9))
        for table in (self._rows.sampling, truncated):
            self._sampler.sample(logits, table, rows, rows)
        del hidden, logits
        self._profile_decodes(cache)

    def _profile_prompts(self, cache: CacheEngine) -> Tensor:
        """Return the hidden states of a step with the largest number of prompt tokens."""
        block_size = self._config.cache.block_size
        # A block may be longer than the model's context.
        chunk_len = min(block_size, self._config.model.max_model_len)
        num_seqs = -(-self._config.scheduler.max_num_batched_tokens // chunk_len)
        position = torch.arange(chunk_len, device=self._device).repeat(num_seqs)
        inputs = AttentionInputs(
            num_decodes=0,
            slot_mapping=position,
            block_tables=self._int_zeros(num_seqs, 1),
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device) * chunk_len,
            seq_lens=self._int_zeros(num_seqs) + chunk_len,
            chunks=ChunkBounds([chunk_len] * num_seqs, [chunk_len] * num_seqs),
        )
        return self._model.forward(torch.zeros_like(position), position, cache.layers, inputs)

    def _profile_decodes(self, cache: CacheEngine) -> None:
        """Run a decode step of all rows with the longest block tables, by which attention sizes its workspace."""
        config = self._config
        num_seqs = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        seq_lens = self._int_zeros(num_seqs) + 1
        splits = None
        if self._device.type == "cuda":
            max_len = config.max_blocks_per_seq * config.cache.block_size
            splits = split_decodes(seq_lens, max_len, self._fixed_item_len)
        position = torch.zeros(num_seqs, dtype=torch.int64, device=self._device)
        inputs = AttentionInputs(
            num_decodes=num_seqs,
            slot_mapping=position,
            block_tables=self._int_zeros(num_seqs, config.max_blocks_per_seq),
            query_start=self._int_zeros(1),
            seq_lens=seq_lens,
            splits=splits,
        )
        self._model.forward(torch.zeros_like(position), position, cache.layers, inputs)

    def _int_zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


def _load_attention(backend: str) -> FlashAttention | None:
    """Return another library's attention of chunks. Returns None for that of quire."""
    if backend == "triton":
        return None
    try:
        attention = load_flash_attention()
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is {backend!r}, but {first_line(error)}; install FlashAttention 3 or leave the "
            "option out"
        ) from error
    _log.info("attention of prompts is computed by FlashAttention 3")
    return attention


def _check_instruction_set() -> None:
    try:
        instruction_set()
    except ValueError as error:
        raise ConfigError(str(error)) from None
