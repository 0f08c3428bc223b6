"""LoadedModel: the weights of one rank and everything that reads them; ModelLoader reads them from checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...proto.config import EngineConfig, ModelConfig
from ...proto.kv_layout import FP8_PER_TENSOR
from ...proto.model.mtp_layouts import mtp_prefixes
from ...proto.model.parallel_split import ParallelSplit
from ...proto.model.quantization import read_quantization
from ..attention import AttentionInputs, LayerCache, with_states
from ..comm.pipeline import Pipeline
from ..graphs.graphs import GraphInputs, GraphLimits
from ..libraries.all_reduce_backend import choose_sums
from ..libraries.experts_backend import OWN_EXPERTS, choose_experts, log_experts
from ..libraries.linear_backend import OWN_LINEAR, choose_linear, log_linear
from ..libraries.recurrence_backend import choose_recurrence
from ..lora.adapters import RankAdapters
from ..lora.layers import NO_LORA, LoraLayers
from ..memory.allocation import out_of_memory_as
from ..models.drafts.draft_head import load_draft_head
from ..models.llama.decoder import Decoder
from ..models.load_context import LoadContext
from ..models.loader import Model, ReadsMedia, load_model, read_more_experts
from ..models.media_embeddings import MediaEmbeddings
from ..models.moe.expert_layers import ExpertLayers
from ..models.output_tokens import OutputTokens
from ..models.vision.encoder import Encoder, load_encoder
from ..pooling.head import read_head
from ..pooling.pooler import Pooler
from ..sampling.sampler import Sampler
from ..speculation.draft_model import DraftModelProposer
from ..speculation.feature_tap import NO_FEATURES, FeatureReader, FeatureTap
from ..speculation.head_proposer import HeadProposer, NoRecordedDrafts
from ..speculation.speculator import DraftProposer, NgramProposer, NoProposer, Speculator
from ..speculation.stage_drafts import ReceivedDrafts, SentDrafts
from ..speculation.stage_features import GatheredFeatures, SentFeatures, features_of, widths_of
from ..step.device_rows import DeviceRows
from ..weights.checkpoint import Checkpoint, ProgressCallback
from ..weights.node_cache import weights_folder
from ..weights.same_layout import has_tensors
from ..weights.standby_weights import StandbyWeights
from ..weights.weight_segment import SegmentReader, SegmentWriter
from ..weights.weight_source import NO_PEERS, NodePeers, WeightOrigin
from .device import on_device
from .expert_balancer import ExpertBalancer, NoBalancer, Orders
from .weight_peers import PieceStream, copy_segment

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """The served model with what reads or shares its weights, which live and end together.

    Attributes:
        pooler: of models that embed or classify; None for others.
        digest: of the checkpoint, as Checkpoint.digest returns it.
        tap: hands hidden states of the model to a draft head, if there is one.
        head: the draft head; None without one, and on later stages.
        drafts: source of drafted tokens, set by ModelLoader.load_drafts.
        encoder: of images; None for a model that reads none, and of later stages.
        has_deep_features: the outputs of the encoder have several embeddings of each image token.
    """

    model: Model
    pooler: Pooler | None
    adapters: RankAdapters
    digest: int
    tap: FeatureTap = field(default_factory=FeatureTap)
    head: HeadProposer | None = None
    drafts: Speculator = field(init=False)
    encoder: Encoder | None = None
    has_deep_features: bool = False

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        outputs: OutputTokens | None = None,
        media: MediaEmbeddings | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm as Model.forward does, those of all tokens if the tap is open."""
        aux = self.tap.make_aux()
        if media is None:
            hidden = self.model.forward(token_ids, positions, kv_caches, inputs, aux, outputs)
        else:
            assert isinstance(self.model, ReadsMedia), "images are read by a model that cannot"
            hidden = self.model.forward(token_ids, positions, kv_caches, inputs, aux, outputs, media)
        self.tap.keep(hidden, aux)
        return hidden

    def compute(
        self,
        kv_caches: list[LayerCache],
        states: Sequence[Sequence[Tensor]],
        inputs: GraphInputs,
        *,
        samples: bool = True,
    ) -> Tensor:
        """Return the logits of a step that is being recorded, or hidden states of a stage that does not sample."""
        self.adapters.begin_step(inputs.lora)
        self.tap.reset()
        attention = with_states(inputs.attention, inputs.state_runs, states)
        hidden = self.forward(inputs.token_ids, inputs.positions, kv_caches, attention)
        self.tap.keep_replayed()
        if not samples:
            return hidden
        if inputs.sampled_index is not None:
            hidden = hidden.index_select(0, inputs.sampled_index)
        return self.model.logits(hidden, inputs.lora.sampled)

    def drop_draft_graphs(self) -> None:
        """Drop the recorded drafts of a head; further ones are computed. Another thread may replay them."""
        if self.head is not None:
            self.head.graphs = NoRecordedDrafts()

    def clear(self) -> None:
        """Forget the sequences of all rows."""
        self.drafts.clear()
        self.tap.reset()


class ModelLoader:
    """Loads the served model of a rank, and the models that draft for it.

    Args:
        inherited: segments with the weights of the rank that this one replaces, other replicas' ranks that have the
            weights of this one, and nodes with copies of the files.

    Attributes:
        standby: the segments that hold the weights in use.
        recurrence: what computes delta rules.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Pipeline,
        dtype: torch.dtype,
        device: torch.device,
        inherited: Sequence[WeightOrigin] = (),
    ) -> None:
        self._config, self._pipeline, self._dtype, self._device = config, pipeline, dtype, device
        self._linear, self._experts = choose_linear(config, device), choose_experts(config, device)
        self._sums = choose_sums(config, device)
        self.recurrence = choose_recurrence(config, device)
        self._peers = next((each for each in inherited if isinstance(each, NodePeers)), NO_PEERS)
        self.standby = StandbyWeights(
            [each for each in inherited if not isinstance(each, NodePeers)],
            is_on=config.parallel.keeps_weights,
            copy=partial(copy_segment, num_ranks=pipeline.replica.size),
        )

    def load(self, model: ModelConfig, on_progress: ProgressCallback | None = None) -> LoadedModel:
        """Load the served model with empty slots for adapters, and its pooler if it has one.

        Raises:
            ConfigError: the model is not supported, or does not fit into memory.
            ModelLoadError: the weights cannot be read.
        """
        adapters = RankAdapters(self._config.lora, self._pipeline.replica, self._dtype, self._device)
        with self._open(model, on_progress, adapters.layers, is_served=True) as load:
            pooler = None
            if model.pooling is not None:
                head = read_head(load, model, model.pooling)
                pooler = Pooler(model.pooling, head, self._config.scheduler.max_num_seqs, self._device)
            encoder = None
            if model.vision is not None and self._pipeline.stage.is_first:
                encoder = load_encoder(load, model.vision, self._config.images.mm_encoder_tp_mode)
            served = load_model(load, model)
            digest = load.checkpoint.digest()
        if self._linear is not OWN_LINEAR:
            log_linear(self._linear)
        if self._experts is not OWN_EXPERTS:
            log_experts(self._experts)
        if adapters.layers.num_slots:
            if self._pipeline.stage.count == 1:  # other stages may have what this one lacks
                adapters.layers.check_targets()
            _log.info("slots for LoRA adapters: %s", adapters.layers.summary)
        has_deep_features = model.vision is not None and model.vision.num_deep_features > 0
        return LoadedModel(
            served, pooler, adapters, digest, encoder=encoder, has_deep_features=has_deep_features
        )

    @property
    def _head_shares_output(self) -> bool:
        """Return whether a draft head on this stage reads the output layer of the last one."""
        speculative, stage = self._config.speculative, self._pipeline.stage
        if speculative is None or speculative.draft is None or not speculative.has_head:
            return False
        if not stage.is_first or stage.is_last:
            return False
        return speculative.method == "mtp" or not has_tensors(speculative.draft.path, ("lm_head.",))

    def open_balancer(self, loaded: LoadedModel, model: ModelConfig) -> ExpertBalancer | NoBalancer:
        """Return what moves the experts of a loaded model."""
        parallel, decoder = self._config.parallel, loaded.model
        mixtures = decoder.mixtures if isinstance(decoder, Decoder) else []
        if not (parallel.enable_eplb and mixtures):
            return NoBalancer()

        def read(orders: Orders) -> dict[int, ExpertLayers]:
            with on_device(self._device), torch.inference_mode(), self._open(model, is_served=True) as load:
                wanted = {layer: (mixtures[layer], experts) for layer, experts in orders.items()}
                return read_more_experts(load, model, wanted)

        return ExpertBalancer(mixtures, self._pipeline.tensor, parallel.eplb_step_interval, read)

    def load_drafts(
        self,
        loaded: LoadedModel,
        model: ModelConfig,
        rows: DeviceRows,
        sampler: Sampler,
        layers: Callable[[], list[LayerCache]],
    ) -> None:
        """Load what drafts for a loaded model, if anything does. Raises as `load` does.

        Weights without a head of multi-token prediction keep the one that the engine started with.

        Args:
            model: the configuration of the loaded model.
            layers: returns the KV cache of what drafts, which is allocated later.
        """
        speculative, block_size = self._config.speculative, self._config.cache.block_size
        stage, link = self._pipeline.stage, self._pipeline.link
        proposer: DraftProposer
        if speculative is None:
            proposer = NoProposer()
        elif not stage.is_first:
            proposer = ReceivedDrafts(rows, link)
            if speculative.has_head:
                self._open_tap(loaded, SentFeatures(link))
        elif speculative.draft is None:
            proposer = NgramProposer(speculative, rows)
        elif speculative.method == "draft_model":
            with self._open(speculative.draft) as load:
                draft_model = load_model(load, speculative.draft)
            proposer = DraftModelProposer(rows, draft_model, sampler, layers, block_size)
        else:
            if speculative.method == "mtp" and has_tensors(model.path, mtp_prefixes(model)):
                speculative = replace(speculative, draft=replace(speculative.draft, path=model.path))
            assert speculative.draft is not None
            with self._open(speculative.draft) as load:
                head = load_draft_head(load, speculative, loaded.model)
            proposer = loaded.head = HeadProposer(rows, head, sampler, layers, block_size)
            reader: FeatureReader = proposer
            if not stage.is_last:
                assert isinstance(loaded.model, Decoder), "other models have no draft head"
                split = ParallelSplit.of(self._config.parallel)
                widths = widths_of(speculative, split, model.num_layers, loaded.model.hidden_size)
                reader = GatheredFeatures(proposer, widths, link)
            self._open_tap(loaded, reader)
        if speculative is not None and stage.is_first and not stage.is_last:
            proposer = SentDrafts(proposer, rows, link)
        loaded.drafts = Speculator(rows, proposer, jumps_forward=stage.count == 1)

    def _open_tap(self, loaded: LoadedModel, reader: FeatureReader) -> None:
        """Let a reader have what the draft head reads of this stage."""
        speculative, stage = self._config.speculative, self._pipeline.stage
        assert speculative is not None
        features = features_of(speculative, stage, self._config.model.num_layers)
        if stage.is_first or features != NO_FEATURES:
            max_tokens = max(shape.num_tokens for shape in GraphLimits.of(self._config).shapes)
            loaded.tap = FeatureTap(reader, features, max_tokens)

    def _folder_of(self, model: ModelConfig) -> Path:
        """Return the folder to read a model's weights from."""
        folder = weights_folder(model.path, self._peers, PieceStream)
        self._peers = self._peers.after_a_use()
        return folder

    @contextmanager
    def _open(
        self,
        model: ModelConfig,
        on_progress: ProgressCallback | None = None,
        lora: LoraLayers = NO_LORA,
        *,
        is_served: bool = False,
    ) -> Iterator[LoadContext]:
        """Open a model's checkpoint. Raises ConfigError if what the body loads does not fit into memory.

        Args:
            is_served: the model is no draft model, which is whole on the first stage, and whose tokens do not travel
                to its experts.
        """
        config, pipeline = self._config, self._pipeline
        with ExitStack() as opened:
            shares_output = is_served and self._head_shares_output
            settings = (
                f"{pipeline.rank} {self._dtype} {config.parallel} {replace(model, path='')} {shares_output}"
            )
            store = opened.enter_context(self.standby.store(Path(model.path), settings))
            has_weights = isinstance(store, SegmentReader)
            folder = Path(model.path) if has_weights else self._folder_of(model)
            checkpoint = opened.enter_context(closing(Checkpoint(folder, on_progress, pipeline.replica.size)))
            if has_weights:
                checkpoint.ignore_all()
            load = LoadContext(
                checkpoint,
                pipeline.tensor,
                self._dtype,
                self._device,
                read_quantization(model),
                sums=self._sums,
                lora=lora,
                expert_parallel=config.parallel.enable_expert_parallel,
                store=store,
                dp_attention=config.parallel.enable_dp_attention,
                attention=pipeline.attention,
                batch_invariant=config.parallel.batch_invariant,
                linear_backend=self._linear,
                experts_backend=self._experts,
                reads_kv_scales=config.cache.kv_cache_dtype == FP8_PER_TENSOR,
                recurrence_backend=self.recurrence,
            )
            if is_served:
                load = replace(
                    load,
                    stage=pipeline.stage,
                    link=pipeline.link,
                    shares_output=shares_output,
                    all2all_backend=config.parallel.all2all_backend,
                    num_redundant_experts=config.parallel.num_redundant_experts,
                    balances_experts=config.parallel.enable_eplb,
                    max_tokens=config.scheduler.max_num_batched_tokens,
                )
            with out_of_memory_as(f"{model.name} does not fit into the memory of rank {pipeline.rank}"):
                yield load
            if isinstance(store, SegmentWriter):
                store.reading_s = checkpoint.reading_s
