"""RankMemory: what one rank has in memory, and its sleep, wake and updates of weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ...proto.config import EngineConfig
from ...proto.engine_command import ALL_TAGS, COMMAND_TIMEOUT_S, Action, EngineCommand, SleepTag
from ...proto.errors import ConfigError, ModelLoadError
from ...proto.model.mtp_layouts import mtp_prefixes
from ...proto.model.parallel_split import ParallelSplit
from ...proto.options.sections import ALL_REDUCE
from ...proto.state_memory import DEFAULT_CPU_KV_BYTES
from ..attention import SplitRule
from ..comm.pipeline import Pipeline
from ..graphs.draft_graphs import DraftGraphs
from ..graphs.graphs import CudaGraphs, GraphBackend, GraphLimits, NoGraphs, StepGraphs
from ..libraries.attention_backend import choose_attention
from ..lora.layers import LoraLayers
from ..lora.step_adapters import NO_ADAPTERS
from ..memory.allocation import free_unused_memory
from ..memory.cache_engine import CacheEngine
from ..memory.kv_memory import KvMemory, KvPartition
from ..memory.shared_segment import SegmentAddress
from ..memory.stored_blocks import HostMemory, NoStoredBlocks, StoredBlocks, open_stored_blocks
from ..sampling.sampler import Sampler
from ..step.device_rows import DeviceRows
from ..step.token_relay import make_relay
from ..weights.checkpoint import ProgressCallback
from ..weights.same_layout import check_same_layout
from ..weights.weight_source import WeightOrigin
from .encoder_outputs import EncodedElsewhere, EncoderOutputs
from .expert_balancer import ExpertBalancer, NoBalancer
from .kv_budget import LargestSteps, profile_kv_bytes
from .loaded_model import LoadedModel, ModelLoader
from .step_executor import StepExecutor, StepStages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)


class RankMemory:
    """The rows of one rank, which last as long as it, and what sleep frees: weights, KV cache and recorded steps.

    The ranks' collectives meet in `prepare`, in `carry_out`, and on a GPU in `num_blocks_that_fit`.

    Args:
        pipeline: the groups of this rank.
        graph_backend, inherited, on_progress: as for ModelRunner.

    Attributes:
        loader: of the weights.
        kv: the KV cache.
        stored: blocks in files.
        attention: what computes the attention of the steps.
        encoder_outputs: the embeddings of images.
        balancer: moves experts between the ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Pipeline,
        device: torch.device,
        stages: StepStages,
        graph_backend: GraphBackend | None = None,
        inherited: Sequence[WeightOrigin] = (),
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._config, self._pipeline, self._device, self._stages = config, pipeline, device, stages
        stage, comm = pipeline.stage, pipeline.tensor
        self._graph_backend = graph_backend
        dtype = DTYPES[config.model.dtype]
        self.attention = choose_attention(config, device)
        self.kv = KvMemory(config, pipeline.rank, dtype, device, stage)
        self.loader = ModelLoader(config, pipeline, dtype, device, inherited)
        self._model = config.model  # with the path of the weights in use
        self._loaded: LoadedModel | None = None
        self.balancer: ExpertBalancer | NoBalancer = NoBalancer()
        self._executor: StepExecutor | None = None
        self.stored: StoredBlocks = NoStoredBlocks()  # opened with the memory that blocks pass through
        self._awake = ALL_TAGS
        self._has_discarded_weights = False  # by sleep at level 2, and not got others yet
        with torch.inference_mode():
            loaded = self.loader.load(self._model, on_progress)
            self.sampler = Sampler(loaded.model.head.shard, comm, device)
            self.rows = DeviceRows(config, loaded.model.head.shard, device, comm, samples=stage.is_last)
            if config.parallel.all2all_backend != ALL_REDUCE:
                sharers = ParallelSplit.of(config.parallel).sharers_of(pipeline.rank)
                self.rows.sender = pipeline.rank - sharers.start, len(sharers)
            max_steps = config.scheduler.max_steps_in_flight
            self.relay = make_relay(stage, self.rows, pipeline.link, max_steps)
            self.encoder_outputs = (
                EncoderOutputs(config.model.vision, device) if stage.is_first else EncodedElsewhere()
            )
            self._keep(loaded)

    @property
    def parts(self) -> frozenset[SleepTag]:
        """Return what is in memory."""
        has = {SleepTag.WEIGHTS: self._loaded is not None, SleepTag.KV_CACHE: self.kv.is_allocated}
        return frozenset(tag for tag in SleepTag if has[tag])

    @property
    def loaded(self) -> LoadedModel:
        """Return the weights, which do not sleep."""
        assert self._loaded is not None, "the weights sleep"
        return self._loaded

    @property
    def executor(self) -> StepExecutor:
        """Return the executor, which exists after `prepare`."""
        assert self._executor is not None, "allocate_cache must be called before the first step"
        return self._executor

    def num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks that fit beside the states, including the scratch block."""
        cache = self._config.cache
        if cache.num_kv_blocks is not None:
            return cache.num_kv_blocks
        num_bytes = cache.kv_cache_memory
        if num_bytes is None:
            num_bytes = DEFAULT_CPU_KV_BYTES if self._device.type == "cpu" else self._gpu_kv_bytes()
        num_blocks = max(0, num_bytes - self.kv.states_bytes) // self.kv.block_bytes
        # Where few layers have keys and values, or none, more blocks than sequences and snapshots can have would fit.
        return min(num_blocks, self._config.max_useful_blocks)

    def allocate_kv(self, num_blocks: int, *, touches_pages: bool, inherited: SegmentAddress | None) -> bool:
        """Allocate the KV cache for the first time, as KvMemory.allocate does."""
        if self._config.parallel.enable_dp_attention:
            num_host_blocks = self._config.cache.num_host_kv_blocks + 1
            place = ParallelSplit.of(self._config.parallel).place_of(self._pipeline.rank)
            self.rows.partition = KvPartition(place.attention, num_blocks, num_host_blocks)
        is_inherited = self.kv.allocate(num_blocks, touches_pages=touches_pages, inherited=inherited)
        self._open_stored()
        return is_inherited

    def _open_stored_again(self) -> None:
        """Open the tiers of stored blocks for other weights or memory; without them if that fails."""
        try:
            self._open_stored()
        except ConfigError as problem:
            _log.error("rank %d stores no KV any more: %s", self._pipeline.rank, problem)
            self.stored = NoStoredBlocks()

    def _open_stored(self) -> None:
        """Open the tiers of stored blocks for the weights and the memory in use. Raises ConfigError."""
        self.stored.close()
        cache = self.kv.cache
        memory = HostMemory(cache.host_parts, cache.host_states)
        self.stored = open_stored_blocks(self._config, self._pipeline.rank, self.loaded.digest, memory)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Check the model and record its steps, once everything is in memory; return whether that was done now.

        Raises:
            ConfigError: the model fails its self-check, or the ranks have read different weights.
        """
        if self._executor is not None or self.parts != ALL_TAGS:
            return False
        loaded = self.loaded
        self._meet()
        self._check_same_weights(loaded.digest)
        self._check_targets(loaded.adapters.layers)
        loaded.model.selfcheck()
        self.balancer.agree()
        self._executor = StepExecutor(
            config=self._config,
            rank=self._pipeline.tensor.rank,
            stage=self._pipeline.stage,
            relay=self.relay,
            waited_s=self._pipeline.link.take_waited_s,
            device=self._device,
            loaded=loaded,
            cache=self.kv.cache,
            graphs=self._record_graphs(self.kv.cache),
            rows=self.rows,
            sampler=self.sampler,
            stages=self._stages,
            attention=self.attention,
            encoder_outputs=self.encoder_outputs,
        )
        if self._wants_graphs and not loaded.model.supports_graphs:
            _log.warning("graphs are disabled: each step of this model reads results back from the device")
        return True

    def _check_same_weights(self, digest: int) -> None:
        """Raise ConfigError on all ranks if one has read other weights: a rank that was replaced, from new files."""
        own = torch.tensor([digest], dtype=torch.int64, device=self._device)
        digests = self._pipeline.replica.all_gather(own).flatten().cpu().tolist()
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise ConfigError(
                    f"rank {rank} has read other weights than rank 0: the files in {self._model.path} were replaced "
                    "while they were served, or the nodes have different ones"
                )

    def _check_targets(self, layers: LoraLayers) -> None:
        """Raise ConfigError if no pipeline stage has a module that adapters are to change."""
        if self._pipeline.stage.count > 1 and layers.targets.names:
            own = torch.tensor(layers.found_targets, dtype=torch.int32, device=self._device)
            layers.check_targets(self._pipeline.replica.all_gather(own).any(dim=0).tolist())

    def drop_graphs(self) -> None:
        """Drop the recorded steps, also while another thread executes one."""
        if (executor := self._executor) is not None:
            executor.graphs.drop()
        if (loaded := self._loaded) is not None:
            loaded.drop_draft_graphs()

    def clear(self) -> None:
        """Empty all rows."""
        self.rows.clear()
        self.encoder_outputs.clear()
        self.relay.clear()
        if self._loaded is not None:
            self._loaded.clear()

    @torch.inference_mode()
    def wake_for_new_group(self) -> None:
        """Forget the group that was left: its recorded collectives, and what its scheduler had adapters read for.

        What sleeps wakes.
        """
        self.clear()
        if self._loaded is not None:
            self._loaded.adapters.clear()
        self._drop_executor()
        free_unused_memory(self._device)
        self._has_discarded_weights = False
        self._take(ALL_TAGS)
        self.stored.reset(None)
        if self.kv.is_allocated:
            self._open_stored_again()

    def carry_out(self, command: EngineCommand) -> str:
        """Carry out a command; return why not, if it was not. All rows are empty afterwards."""
        self.clear()
        self.stored.close()
        carry_out = {
            Action.SLEEP: self._sleep,
            Action.WAKE_UP: self._wake_up,
            Action.UPDATE_WEIGHTS: self._update_weights,
        }
        error = carry_out[command.action](command)
        if self.parts == ALL_TAGS:
            self._open_stored_again()
        return error

    def close(self) -> None:
        """Free everything; called once."""
        self.stored.close()
        self._drop_weights()
        self.kv.close()
        self._graph_backend = None
        del self.rows, self.relay, self.sampler, self.attention
        free_unused_memory(self._device)

    @torch.inference_mode()
    def run_largest_steps(self, cache: CacheEngine | None = None) -> None:
        """Run the steps that need most memory, by default on a scratch block alone."""
        samples = self._pipeline.stage.is_last
        steps = LargestSteps(
            self._config, self.loaded.model, self.sampler, self.rows.sampling, self._device, samples=samples
        )
        steps.run(self.kv.make_scratch() if cache is None else cache)

    # Commands

    def _sleep(self, command: EngineCommand) -> str:
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
        self._meet()
        if self._all_ranks(not error):
            return ""
        self._free(asleep)
        return error or "another rank lacks memory, or cannot read the weights"

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
        self._meet()
        if not self._all_ranks(not error):
            return error or "another rank cannot read the weights; its node may lack the files"
        self._model = replace(self._model, path=command.path)
        self._has_discarded_weights = False
        self._drop_weights()
        free_unused_memory(self._device)
        self._take(self._awake)
        return ""

    def _free(self, tags: frozenset[SleepTag]) -> None:
        """Free the recorded steps and the memory that the tags name."""
        self._awake -= tags
        self._drop_executor()
        if SleepTag.WEIGHTS in tags:
            self._drop_weights()
        if SleepTag.KV_CACHE in tags:
            self.kv.free()
        free_unused_memory(self._device)

    def _take(self, tags: frozenset[SleepTag]) -> None:
        """Load and allocate what the tags name, but no weights that were discarded: others will be named.

        Raises:
            ConfigError: there is not enough memory.
            ModelLoadError: the weights cannot be read.
        """
        self._awake |= tags
        if SleepTag.WEIGHTS in tags and self._loaded is None and not self._has_discarded_weights:
            self._keep(self.loader.load(self._model))
        if SleepTag.KV_CACHE in tags:
            self.kv.allocate_again()

    def _keep(self, loaded: LoadedModel) -> None:
        """Keep loaded weights, and load what drafts for them."""
        self._loaded = loaded
        self.balancer = self.loader.open_balancer(loaded, self._model)
        self.loader.load_drafts(
            loaded, self._model, self.rows, self.sampler, lambda: self.kv.cache.draft_layers
        )

    def _drop_weights(self) -> None:
        """Drop every reference to weights. The scheduler has the adapters read again; see LoraAdapters.reset."""
        self._drop_executor()  # graphs hold the addresses of weights
        if self._loaded is not None:
            self._loaded.adapters.close()
        self.loader.standby.drop()
        self._loaded = None
        self.balancer = NoBalancer()

    # Graphs

    def _drop_executor(self) -> None:
        """Drop what executes steps, with all recordings."""
        self.drop_graphs()
        self._executor = None

    @property
    def _wants_graphs(self) -> bool:
        is_available = self._device.type == "cuda" or self._graph_backend is not None
        return is_available and self._config.parallel.cuda_graphs and self._config.model.generates

    def _record_graphs(self, cache: CacheEngine) -> StepGraphs | NoGraphs:
        """Record steps of every recorded shape on a cache, if graphs are on."""
        loaded = self.loaded
        if not (self._wants_graphs and loaded.model.supports_graphs):
            return NoGraphs()
        is_last, backend = self._pipeline.stage.is_last, self._graph_backend or CudaGraphs(self._device)
        graphs = StepGraphs(
            partial(loaded.compute, cache.layers, cache.states, samples=is_last),
            GraphLimits.of(self._config, gathers_keys=loaded.model.gathers_keys),
            self._device,
            backend,
            self._all_ranks,
            SplitRule.of(self._config),
            self.attention.for_graphs(),
            self._pipeline.link,
            returns_states=not is_last,
        )
        self._stages.begin("record")
        graphs.record_all()
        loaded.adapters.begin_step(NO_ADAPTERS)
        self._record_drafts(cache, backend)
        self._stages.reset()
        return graphs

    def _record_drafts(self, cache: CacheEngine, backend: GraphBackend) -> None:
        """Record the drafts of a head, unless one call computes all of them, as on a CPU."""
        head, config = self.loaded.head, self._config
        if head is None or head.is_fused:
            return
        assert config.speculative is not None
        graphs = DraftGraphs(
            self.rows,
            head.head,
            self.sampler,
            cache.draft_layers,
            config.cache.block_size,
            config.speculative.num_speculative_tokens,
            backend,
            partial(self._all_ranks, of_stage=True),
        )
        if graphs.record_all(DTYPES[config.model.dtype]):
            head.graphs = graphs

    def _meet(self) -> None:
        """Wait for the other ranks, which may still read weights or allocate memory."""
        self._pipeline.replica.meet(COMMAND_TIMEOUT_S)

    def _all_ranks(self, is_true: bool, *, of_stage: bool = False) -> bool:
        """Return whether the argument is true on all ranks, or on those of this stage, which call this together."""
        own = torch.tensor([is_true], dtype=torch.int32, device=self._device)
        group = self._pipeline.tensor if of_stage else self._pipeline.replica
        return bool(group.all_gather(own).all())

    @torch.inference_mode()
    def _gpu_kv_bytes(self) -> int:
        """Return the GPU memory that the largest step and the graphs leave for the KV cache."""
        scratch = self.kv.make_scratch()
        num_bytes = profile_kv_bytes(
            self._device,
            self._config.cache.gpu_memory_utilization,
            partial(self.run_largest_steps, scratch),
            partial(self._record_graphs, scratch),  # they are recorded again on the whole cache
        )
        self.loaded.drop_draft_graphs()
        reserved = self.loaded.model.reserved_bytes
        if self._pipeline.stage.is_first:
            reserved += self._config.encoder_cache_bytes
        return max(0, num_bytes - reserved)
