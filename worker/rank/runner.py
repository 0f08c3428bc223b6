"""ModelRunner: one rank's weights, KV cache and rows, and the execution of steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.dispatch import num_compilations
from ...kernels.native.instruction_sets import instruction_set
from ...kernels.native.memory import keep_freed_memory
from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig, SpeculativeConfig
from ...proto.engine_command import ALL_TAGS, Action, EngineCommand, SleepTag
from ...proto.errors import ConfigError, ModelLoadError, RankFailed, in_one_line
from ...proto.model.mtp_layouts import mtp_prefixes
from ...proto.step import StepPlan, StepResult
from ..attention import LayerCache, fixed_item_len
from ..comm.communicator import Communicator
from ..graphs.graph_backend import CudaGraphs, GraphBackend
from ..graphs.graphs import GraphInputs, GraphLimits, StepGraphs
from ..lora.adapters import RankAdapters
from ..lora.step_adapters import NO_ADAPTERS
from ..memory.allocation import check_host_memory, free_unused_memory, out_of_memory_as
from ..memory.cache_engine import DEFAULT_CPU_KV_BYTES, CacheEngine, bytes_per_block
from ..memory.host_to_device import to_device
from ..memory.kv_budget import profile_kv_bytes
from ..memory.kv_segment import KvSegment
from ..memory.shared_segment import SegmentAddress
from ..models.drafts.draft_head import load_draft_head
from ..sampling.sampler import Sampler
from ..speculation.draft_model import DraftModelProposer
from ..speculation.feature_tap import FeatureTap
from ..speculation.head_proposer import HeadProposer
from ..speculation.ngram import NgramProposer
from ..speculation.proposer import DraftProposer
from ..speculation.speculator import Speculator
from ..step.batch import Batch, gather_batch
from ..step.device_rows import DeviceRows
from ..step.kv_partition import KvPartition
from ..step.launched_step import LaunchedStep
from ..step.step_stages import IDLE, StepStages
from ..weights.checkpoint import ProgressCallback
from ..weights.same_layout import check_same_layout, has_tensors
from .attention_backend import load_chunk_attention, log_chunk_attention
from .device import compute_device
from .largest_steps import LargestSteps
from .rank_models import RankModels
from .step_executor import StepExecutor
from .warm_up import warm_up_plans

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
        inherited: segments with the weights of the rank that this one replaces; see `weight_segments`.

    Attributes:
        device: of the weights and the KV cache.

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
        inherited: Sequence[SegmentAddress] = (),
    ) -> None:
        self._stages = StepStages()
        self._config = config
        self._comm = comm
        self.device = self._device = compute_device(config.parallel.device) if device is None else device
        self._dtype = DTYPES[config.model.dtype]
        if self._device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_rank)
            _check_instruction_set()
        self._attend_chunks = load_chunk_attention(config.parallel.attention_backend)
        self._tap: FeatureTap | None = None
        self._keeps_states = True  # of the last plan
        self._speculator: Speculator | None = None
        with torch.inference_mode():
            self._models = RankModels(config, comm, self._dtype, self._device, inherited)
            self._model_in_use = config.model  # with the path of the weights
            self._load_model(on_progress)
            self._sampler = Sampler(self._model.head.shard, comm, self._device)
            self._rows = DeviceRows(config, self._model.head.shard, self._device, comm)
            self._load_drafts()
        if self._device.type == "cpu":
            keep_freed_memory(KEPT_BYTES)
        self._cache: CacheEngine | None = None  # before `allocate_cache`, and in sleep
        self._kv_segment: KvSegment | None = None
        self._awake = ALL_TAGS
        self._has_discarded_weights = False  # by sleep at level 2, and not got others yet
        self._num_blocks_asleep = 0
        self._graph_backend = graph_backend
        self._graphs: StepGraphs | None = None
        self._executor: StepExecutor | None = None  # as the cache
        self._is_closed = False
        self._num_compilations = 0  # when the rank was ready

    def _load_model(self, on_progress: ProgressCallback | None = None) -> None:
        """Load the weights in use, with empty slots for adapters."""
        self._adapters = RankAdapters(self._config.lora, self._comm, self._dtype, self._device)
        layers = self._adapters.layers
        self._model, self._pooler = self._models.load(self._model_in_use, on_progress, layers)
        if layers.num_slots:
            layers.check_targets()
            _log.info("slots for LoRA adapters: %s", layers.summary)

    def _load_drafts(self) -> None:
        """Load what drafts for the model, if anything does.

        Weights without a head of multi-token prediction keep the one that the engine started with.
        """
        speculative = self._config.speculative
        if speculative is None:
            if self._config.drafts_forced_text:
                self._speculator = Speculator(self._rows)
            return
        model = self._model_in_use
        if speculative.method == "mtp" and has_tensors(model.path, mtp_prefixes(model)):
            assert speculative.draft is not None
            speculative = replace(speculative, draft=replace(speculative.draft, path=model.path))
        proposer, self._tap = self._make_proposer(speculative)
        self._speculator = Speculator(self._rows, proposer)

    def _make_proposer(self, speculative: SpeculativeConfig) -> tuple[DraftProposer, FeatureTap | None]:
        """Load the model that drafts, if there is one; with a draft head, return what taps its hidden states."""
        if speculative.draft is None:
            return NgramProposer(speculative, self._rows), None
        block_size = self._config.cache.block_size
        if speculative.method == "draft_model":
            model, _ = self._models.load(speculative.draft)
            return DraftModelProposer(self._rows, model, self._sampler, self._draft_layers, block_size), None
        with self._models.open(speculative.draft) as load:
            head = load_draft_head(load, speculative, self._model)
        max_tokens = max(shape.num_tokens for shape in GraphLimits.of(self._config).shapes)
        tap = FeatureTap(self._model, head.aux_layers, max_tokens)
        return HeadProposer(self._rows, head, self._sampler, self._draft_layers, block_size), tap

    def _draft_layers(self) -> list[LayerCache]:
        return self._kv_cache.draft_layers

    @property
    def stage(self) -> str:
        """Return ``idle``, ``apply``, ``draft``, ``forward``, ``sample``, ``command`` or ``record``."""
        return self._stages.stage

    @property
    def weight_segments(self) -> tuple[SegmentAddress, ...]:
        """Return the segments that hold the weights, open in this process; none without `standby_weights`."""
        return self._models.segments

    @property
    def kv_segment(self) -> SegmentAddress | None:
        """Return the segment that holds the KV cache, the same one as long as the runner lives, or None."""
        return None if self._kv_segment is None else self._kv_segment.address

    def num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks that fit into this rank's memory, including the scratch block."""
        cache = self._config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        num_bytes = cache.memory_bytes
        if num_bytes is None:
            num_bytes = DEFAULT_CPU_KV_BYTES if self._device.type == "cpu" else self._gpu_kv_bytes()
        return num_bytes // bytes_per_block(self._config, self._dtype)

    def allocate_cache(
        self, num_blocks: int, *, touches_pages: bool = True, inherited: SegmentAddress | None = None
    ) -> float:
        """Allocate the KV cache on the device and the host; called once, before the first step.

        Args:
            touches_pages: on a CPU, write the whole memory now, so that no step does so for the first time.
            inherited: memory of the rank that this one replaces, whose content stays; see `kv_segment`.

        Returns:
            blocks/s that swaps move between the two, each way; 0 without a host tier or with inherited memory.

        Raises:
            ConfigError: there is not enough memory, or the model fails its self-check.
        """
        is_inherited = self._allocate_cache(num_blocks, touches_pages, inherited)
        self._prepare(num_blocks)
        return 0.0 if is_inherited else self._kv_cache.measure_swap_rate()  # which writes host blocks

    def _allocate_cache(
        self, num_blocks: int, touches_pages: bool = True, inherited: SegmentAddress | None = None
    ) -> bool:
        """Allocate the KV cache; return whether its memory is that of the rank before. Raises ConfigError."""
        device_bytes, host_bytes = (
            count * bytes_per_block(self._config, self._dtype)
            for count in (num_blocks, self._config.cache.num_host_blocks)
        )
        on_host = f" and {host_bytes / 2**30:.2f} GiB for swapped blocks" if host_bytes else ""
        failure = (
            f"rank {self._comm.rank} cannot allocate {device_bytes / 2**30:.2f} GiB of KV memory{on_host}"
        )
        segment = self._kv_segment = self._open_kv_segment(num_blocks, inherited)
        is_inherited = segment is not None and segment.is_inherited
        if not is_inherited:
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
                segment=segment,
            )
        if self._config.parallel.enable_dp_attention:
            num_host_blocks = self._config.cache.num_host_blocks + 1
            self._rows.partition = KvPartition(self._comm.rank, num_blocks, num_host_blocks)
        return is_inherited

    def _open_kv_segment(self, num_blocks: int, inherited: SegmentAddress | None) -> KvSegment | None:
        """Return the segment for the KV cache: the present one, that of the rank before, or a new one.

        Returns None without `standby_weights`, or if the system has no such memory.
        """
        if not self._config.parallel.standby_weights or self._kv_segment is not None:
            return self._kv_segment
        try:
            if inherited is not None:
                return KvSegment.open(inherited)
        except OSError as error:
            _log.warning("rank %d cannot map the KV of the rank before: %s", self._comm.rank, error)
        num_all_blocks = num_blocks + self._config.cache.num_host_blocks + 1
        try:
            return KvSegment.create(num_all_blocks * bytes_per_block(self._config, self._dtype))
        except OSError as error:
            _log.warning("the KV of rank %d ends with its process: %s", self._comm.rank, error)
            return None

    def reset(self, *, has_new_ranks: bool) -> None:
        """Empty all rows after the group was joined anew, and prepare for steps as `allocate_cache` does.

        The weights and the memory of the KV cache stay. A rank that sleeps wakes: new ranks are awake, and a new
        scheduler does not know of the sleep.

        Args:
            has_new_ranks: these launch every kernel, with collectives that all ranks join and, on a GPU, in any
                blocks of the device. Otherwise no block is written.
        """
        self._stages.reset()
        self._clear_rows()
        self._adapters.clear()
        # Graphs hold the collectives of the group that was left.
        self._graphs = self._executor = None
        free_unused_memory(self._device)
        self._has_discarded_weights = False
        with torch.inference_mode():
            self._take(ALL_TAGS)
        self._prepare_if_awake(warms_up=has_new_ranks)

    def _prepare(self, num_blocks: int, *, warms_up: bool = True) -> None:
        """Check the model, record the graphs and launch every kernel once. The ranks' collectives meet here."""
        with torch.inference_mode():
            self._model.selfcheck()
            self._graphs = self._record_graphs(self._kv_cache)
            self._executor = self._make_executor(self._kv_cache)
        if self._device.type != "cpu" and warms_up:
            self._warm_up(num_blocks)
            log_chunk_attention(self._attend_chunks)
        if self._wants_graphs and not self._model.supports_graphs:
            _log.warning("graphs are disabled: each step of this model reads results back from the device")
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
        stages = self._stages
        result = StepResult(plan.step_id, plan.epoch, self._comm.rank, stage_times=stages.begin_step())
        try:
            if plan.command is not None:
                result.command_error = self._carry_out(plan.command)
                return LaunchedStep(result)
            stages.begin("apply")
            self._apply(plan)
            num_drafted = None
            if self._speculator is not None:
                num_drafted = self._draft(self._speculator, plan)
            batch = self._gather(plan, num_drafted)
            stages.begin(IDLE)
            result.lora_reports = self._adapters.take_reports(is_idle=batch is None)
            step = LaunchedStep(result) if batch is None else self._compute(batch, result)
            # None is expected.
            result.num_compilations = num_compilations() - self._num_compilations
            return step
        except RankFailed:
            raise
        except Exception as error:
            raise self._failure(plan, in_one_line(error)) from error

    def _draft(self, speculator: Speculator, plan: StepPlan) -> IntArray | None:
        """Draft tokens as Speculator.draft does."""
        num_drafted = None
        if plan.draft_rows.size or plan.released_rows.size:
            self._stages.begin("draft")
            self._kv_cache.wait_for_swaps()
            num_drafted = speculator.draft(plan)
            self._stages.begin("apply")
        if self._tap is not None and (plan.keeps_states or self._keeps_states):
            if not plan.keeps_states:
                speculator.drop_states()
            self._tap.is_open = plan.keeps_states and speculator.wants_features
            self._keeps_states = plan.keeps_states
        return num_drafted

    # Commands

    def _carry_out(self, command: EngineCommand) -> str:
        """Carry out a command; return why not, if it was not. All rows are empty afterwards.

        The ranks' collectives meet here.
        """
        self._stages.begin("command")
        self._clear_rows()
        error = {
            Action.SLEEP: self._sleep,
            Action.WAKE_UP: self._wake_up,
            Action.UPDATE_WEIGHTS: self._update_weights,
        }[command.action](command)
        self._stages.reset()
        return error

    def _sleep(self, command: EngineCommand) -> str:
        """Free the weights, those of adapters and drafts too, the KV cache and the graphs."""
        self._has_discarded_weights |= command.level == 2
        self._free(ALL_TAGS)
        return ""

    def _wake_up(self, command: EngineCommand) -> str:
        """Take memory again on all ranks, or on none."""
        tags, error = frozenset(command.tags) or ALL_TAGS, ""
        asleep = tags - self._awake
        try:
            self._take(tags)
        except (ConfigError, ModelLoadError) as problem:
            error = str(problem)
        if not self._all_ranks(not error):
            self._free(asleep)
            return error or "another rank lacks memory, or cannot read the weights"
        self._prepare_if_awake()
        return ""

    def _free(self, tags: frozenset[SleepTag]) -> None:
        """Free the graphs and the memory that the tags name."""
        self._awake -= tags
        self._graphs = self._executor = None
        if SleepTag.WEIGHTS in tags:
            self._drop_weights()
        if SleepTag.KV_CACHE in tags and self._cache is not None:
            self._num_blocks_asleep, self._cache = self._cache.num_blocks, None
            if self._kv_segment is not None:
                self._kv_segment.clear()
        free_unused_memory(self._device)

    def _take(self, tags: frozenset[SleepTag]) -> None:
        """Load and allocate what the tags name, but no weights that were discarded: others will be named.

        Raises:
            ConfigError: there is not enough memory.
            ModelLoadError: the weights cannot be read.
        """
        self._awake |= tags
        if SleepTag.WEIGHTS in tags and not self._has_model and not self._has_discarded_weights:
            self._load_model()
            self._load_drafts()
        if SleepTag.KV_CACHE in tags and self._cache is None:
            self._allocate_cache(self._num_blocks_asleep)

    def _prepare_if_awake(self, *, warms_up: bool = True) -> None:
        if self._awake == ALL_TAGS and self._executor is None:
            self._prepare(self._kv_cache.num_blocks, warms_up=warms_up)

    def _update_weights(self, command: EngineCommand) -> str:
        """Load the weights of another directory in place of the present ones; if these sleep, when they wake."""
        error = ""
        # Trainers often store no heads that draft, and a tied output layer beside the embedding.
        model = self._config.model
        optional = mtp_prefixes(model) + (("lm_head.",) if model.hf.get("tie_word_embeddings") else ())
        try:
            check_same_layout(model.path, command.path, optional)
        except ModelLoadError as problem:
            error = str(problem)
        if not self._all_ranks(not error):
            return error or "another rank cannot read the weights; its node may lack the files"
        self._model_in_use = replace(self._model_in_use, path=command.path)
        self._has_discarded_weights = False
        self._drop_weights()
        free_unused_memory(self._device)
        self._take(self._awake)
        self._prepare_if_awake()
        return ""

    def _drop_weights(self) -> None:
        """Drop every reference to weights. The scheduler has the adapters read again; see LoraAdapters.reset."""
        # Graphs hold the addresses of weights, and draft heads share those of the model.
        self._graphs = self._executor = self._pooler = self._speculator = self._tap = None
        self._adapters.close()
        self._models.drop_segments()
        vars(self).pop("_model", None)

    @property
    def _has_model(self) -> bool:
        """Return whether the weights are loaded; they are not in sleep."""
        return "_model" in vars(self)

    def _clear_rows(self) -> None:
        self._rows.clear()
        self._keeps_states = True  # recorded steps do, whatever the last plan said
        if self._speculator is not None:
            self._speculator.clear()

    def close(self) -> None:
        """Leave the group, and free the weights, the KV cache and the graphs. Safe to call twice."""
        self._comm.close()
        if self._is_closed:
            return
        self._is_closed = True
        self._cache = self._graphs = self._executor = self._graph_backend = None
        if self._kv_segment is not None:
            self._kv_segment.close()
            self._kv_segment = None
        self._speculator = None
        self._adapters.close()
        self._models.drop_segments()
        vars(self).pop("_model", None)
        del self._sampler, self._rows
        free_unused_memory(self._device)

    def _apply(self, plan: StepPlan) -> None:
        self._adapters.apply(plan)
        self._rows.apply(plan)
        digest = self._rows.tables.digest
        if digest != plan.digest:
            reason = f"its block tables have digest {digest:016x}, the scheduler's {plan.digest:016x}"
            raise self._failure(plan, reason)
        if self._rows.partition is not None:
            plan = self._rows.partition.own_moves(plan)
        if len(plan.swap_out):
            self._kv_cache.swap_out(torch.from_numpy(plan.swap_out.astype(np.int64)))
        if len(plan.swap_in):
            self._kv_cache.swap_in(torch.from_numpy(plan.swap_in.astype(np.int64)))
        if len(plan.copies):
            self._kv_cache.copy(to_device(plan.copies, self._device, torch.int64))

    def _compute(self, batch: Batch, result: StepResult) -> LaunchedStep:
        assert self._executor is not None, "allocate_cache must be called before the first step"
        return self._executor.launch(batch, result)

    def _gather(self, plan: StepPlan, num_drafted: IntArray | None) -> Batch | None:
        return gather_batch(self._rows, plan, self._config.cache.block_size, num_drafted)

    def _record_graphs(self, cache: CacheEngine) -> StepGraphs | None:
        """Record steps of every recorded shape on this cache. Returns None if graphs are off."""
        if not self._uses_graphs:
            return None

        def compute(inputs: GraphInputs) -> Tensor:
            step = inputs.token_ids, inputs.positions, cache.layers, inputs.attention
            self._adapters.begin_step(inputs.lora)
            hidden = self._model.forward(*step) if self._tap is None else self._tap.record(*step)
            if inputs.sampled_index is not None:
                hidden = hidden.index_select(0, inputs.sampled_index)
            return self._model.logits(hidden, inputs.lora.sampled)

        graphs = StepGraphs(
            compute,
            GraphLimits.of(self._config),
            self._device,
            self._graph_backend or CudaGraphs(self._device),
            self._all_ranks,
            fixed_item_len(self._config.parallel),
        )
        self._stages.begin("record")
        graphs.record_all()
        self._adapters.begin_step(NO_ADAPTERS)
        self._stages.reset()
        return graphs

    def _make_executor(self, cache: CacheEngine) -> StepExecutor:
        return StepExecutor(
            config=self._config,
            rank=self._comm.rank,
            device=self._device,
            model=self._model,
            pooler=self._pooler,
            cache=cache,
            graphs=self._graphs,
            rows=self._rows,
            sampler=self._sampler,
            adapters=self._adapters,
            speculator=self._speculator,
            tap=self._tap,
            stages=self._stages,
        )

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
    def _wants_graphs(self) -> bool:
        is_available = self._device.type == "cuda" or self._graph_backend is not None
        return is_available and self._config.parallel.cuda_graphs and self._config.model.generates

    @property
    def _uses_graphs(self) -> bool:
        return self._wants_graphs and self._model.supports_graphs

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
        LargestSteps(self._config, self._model, self._sampler, self._rows.sampling, self._device).run(cache)


def _check_instruction_set() -> None:
    try:
        instruction_set()
    except ValueError as error:
        raise ConfigError(str(error)) from None
