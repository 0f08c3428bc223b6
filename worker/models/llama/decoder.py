"""Decoder: Llama and related architectures; a DecoderSpec holds their differences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ....kernels.decode_layers import DenseLayer
from ....kernels.draft_chain import DraftNetwork
from ....kernels.latent_attention import EXPANDED_BYTES
from ....kernels.lora import LoraGroups
from ....kernels.sparse_latent import SELECTION_BYTES
from ....proto.model.attention import AttentionSpec
from ....proto.model.mla import MlaSpec
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache
from ...lora.layers import NO_LORA
from ..aux_states import AuxStates
from ..fused_decode import FusedDecode, log_op_by_op, plan_fused_decode
from ..layers import PartialSum, RotaryTable, Rotations
from ..load_context import LoadContext
from ..media_embeddings import MediaEmbeddings
from ..mixers.block_sparse import BlockSparseAttention
from ..mixers.head_steps import LOGARITHM, TEMPERATURE, LogarithmTable, TemperatureTable
from ..mixers.state_mixer import StateMixer
from ..moe.expert_layout import other_experts
from ..moe.moe import MixtureOfExperts, WithExperts
from ..output_tokens import OutputTokens
from ..vocab_parallel import NoHead, VocabParallelEmbedding, VocabParallelHead
from .decoder_layer import DecoderLayer, Norm, read_norm

_log = logging.getLogger(__name__)


class Decoder:
    """A decoder-only model, or a stage's layers of one; implements `loader.Model`.

    Families that differ much override its parts.

    Args:
        num_positions: length of the rotary tables.
        has_head: the model generates; otherwise it has hidden states only.

    Attributes:
        num_layers: of the whole model.
        head: of the last stage, and of the first one if a draft head shares it.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    reads_media = True

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        # The ranks meet here, so before any weights are read: they read at different speeds.
        if load.sums is not None:
            peers = load.sums.open(load.comm, spec.hidden_size, load.dtype, load.device)
            load = replace(load, peers=peers)
        self.rotary = {key: RotaryTable(load, rope, num_positions) for key, rope in spec.ropes.items()}
        self.temperature: TemperatureTable | None = None
        self.logarithms: LogarithmTable | None = None
        self.stage, self.link = load.stage, load.link
        self.owns_tokens = load.expert_exchange.owns_tokens
        self._tells_states = load.attention.rank == 0  # of the ranks that have the same tokens
        own_layers = self.stage.part(spec.layers)
        mixers = [layer.mixer for layer in own_layers]
        for own in [layer.mixer for layer in spec.layers]:
            temperature = own.temperature if isinstance(own, AttentionSpec | MlaSpec) else None
            if temperature is not None and self.temperature is None:
                self.temperature = TemperatureTable(load, temperature, num_positions)
        if any(isinstance(own, MlaSpec) and own.has_query_factors for own in mixers):
            self.logarithms = LogarithmTable(load, num_positions)
        holds_head = has_head and (self.stage.is_last or load.shares_output)
        # A head on another rank has a weight of its own.
        shares_head = spec.tied_embeddings and holds_head and self.stage.is_first
        self.entry: VocabParallelEmbedding | PreviousStage = (
            VocabParallelEmbedding(
                load,
                spec.names.embedding,
                spec.vocab_size,
                spec.hidden_size,
                spec.embedding_scale,
                norm_eps=spec.norm_eps if spec.normalizes_embeddings else None,
                tied=shares_head,
            )
            if self.stage.is_first
            else PreviousStage(load, spec.hidden_size)
        )
        self.layers = self.make_layers(load, spec)
        self.num_layers = len(spec.layers)
        self.cached_by = _cache_indices(own_layers)
        keeps_state = (layer.attention for layer in self.layers if isinstance(layer.attention, StateMixer))
        for number, state_mixer in enumerate(keeps_state):
            state_mixer.layer = number
        self.comm, self.lora = load.comm, load.lora
        self.hidden_size = spec.hidden_size
        self.reserved_bytes = _reserved_bytes(mixers)
        self.supports_graphs = not any(mlp.reads_back for mlp in self._mixtures())
        self.gathers_keys = any(isinstance(layer.attention, BlockSparseAttention) for layer in self.layers)
        self.supports_outputs = self.stage.is_last and self.layers[-1].supports_outputs
        self.norm = self.read_last_norm(load, spec) if self.stage.is_last else None
        self.fused_decode = self._plan_fused_decode(load)
        if any(mlp.is_separate for mlp in self._mixtures()):
            _log.warning(
                "experts are multiplied one by one, which is slower: no op takes their weights together"
            )
        self.head: VocabParallelHead | NoHead = NoHead(load, spec.vocab_size)
        if holds_head:
            self.head = VocabParallelHead(
                load if self.stage.is_last else replace(load, lora=NO_LORA),
                "lm_head",
                spec.hidden_size,
                spec.vocab_size,
                tied=self.embedding if shares_head else None,
                bias=spec.head_bias,
                scale=spec.logits_scale,
                soft_cap=spec.logits_soft_cap,
                stored=spec.names.embedding if spec.tied_embeddings else None,
            )
        # Some checkpoints store the head even though it is tied.
        unused = [name for name in load.checkpoint.names() if name.startswith(spec.draft_prefixes)]
        if spec.tied_embeddings or not has_head:
            unused.append("lm_head.weight")
        if spec.experts is not None:
            unused += other_experts(load, spec.experts)
        unused += _of_other_stages(load, spec)
        load.checkpoint.check_all_read(ignoring=unused)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The embedding; only the first stage has it."""
        assert isinstance(self.entry, VocabParallelEmbedding), f"{self.stage} has no embedding"
        return self.entry

    def make_layers(self, load: LoadContext, spec: DecoderSpec) -> list[DecoderLayer]:
        """Return the layers."""
        return [
            self.layer_class(load, spec, layer, f"{spec.names.layers}.{index}")
            for index, layer in enumerate(self.stage.part(spec.layers), self.stage.first)
        ]

    def read_last_norm(self, load: LoadContext, spec: DecoderSpec) -> Norm | None:
        """Return the norm of the hidden states after the last layer; None if there is none."""
        return read_norm(load, spec, spec.norms, spec.names.last_norm)

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """Return the mixtures of experts whose experts may move."""
        return [mlp for mlp in self._mixtures() if isinstance(mlp, MixtureOfExperts)]

    def _mixtures(self) -> list[WithExperts]:
        return [mlp for mlp in self._networks() if isinstance(mlp, WithExperts)]

    def _networks(self) -> list[object]:
        return [layer.mlp for layer in self.layers]

    def _plan_fused_decode(self, load: LoadContext) -> FusedDecode | None:
        norm = self.norm
        if norm is None and isinstance(self.layers[-1].before_mlp, Tensor):
            norm = torch.ones_like(self.layers[-1].before_mlp)  # the residual is read beside it
        if not isinstance(norm, Tensor):
            log_op_by_op(load.device, "its norms are no RMSNorm")
            return None
        mixtures = [
            layer.forward_mixture if isinstance(layer.mlp, MixtureOfExperts) else None
            for layer in self.layers
        ]
        return plan_fused_decode(self._dense_layers(), mixtures, norm, load.comm)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
        media: MediaEmbeddings | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E] or [N, E]; add those between layers to `aux`.

        A stage before the last one returns those that it sends to the next stage.
        """
        hidden = self.entry.forward(token_ids)
        deep: Sequence[Tensor] = ()
        if media is not None:
            hidden.index_copy_(0, media.index, media.rows)
            deep = media.deep
        num_tokens = len(hidden)
        if self.owns_tokens:
            hidden = inputs.own(hidden)
        rotated = {key: table.at(inputs.own(positions)) for key, table in self.rotary.items()}
        fused = self.fused_decode
        if fused is not None and fused.supports(len(hidden), inputs):
            normed = fused.forward(
                hidden, list(rotated.values()), kv_caches, inputs, aux, self.lora.step.groups
            )
            return normed if self.stage.is_last else self._send(hidden)  # which it has added to
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {None: (None, None)}
        rotations.update(rotated.items())
        rotations.update(self.other_inputs(token_ids, inputs.own(positions), hidden, media))
        x: Tensor | PartialSum | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kv_cache = self._cache_of(index, kv_caches)
            if aux is not None and index in aux.layers:
                aux.states.append(self._all_tokens(layer.input_of(x, hidden), inputs, num_tokens))
            if outputs is not None and index == last:
                x, hidden = layer.forward_outputs(x, hidden, rotations, kv_cache, outputs)
            else:
                x = layer.forward(x, hidden, rotations, kv_cache, inputs)
            if media is not None and index < len(deep):
                hidden.index_add_(0, media.index, deep[index])
        if aux is not None and len(self.layers) in aux.layers:
            aux.states.append(self._all_tokens(self.layers[-1].input_of(x, hidden), inputs, num_tokens))
        states = self.layers[-1].add(x, hidden, self.norm)
        states = self._all_tokens(states, inputs, num_tokens)
        return states if self.stage.is_last else self._send(states)

    def _cache_of(self, index: int, kv_caches: Sequence[LayerCache]) -> LayerCache:
        """Return the cache of a layer, with that of its indexer behind it."""
        place = self.cached_by[index]
        if not isinstance(self.layers[index].attention, BlockSparseAttention):
            return kv_caches[place]
        return replace(kv_caches[place], index_keys=kv_caches[place + 1])

    def _all_tokens(self, states: Tensor, inputs: AttentionInputs, num_tokens: int) -> Tensor:
        """Return the states of all tokens, of which each may have one owner: [N, E] -> [T, E]."""
        if not self.owns_tokens:
            return states
        assert inputs.own_tokens is not None
        y = states.new_zeros(num_tokens + 1, states.shape[1])  # padding goes behind all tokens
        if self._tells_states:
            y.index_copy_(0, inputs.own_tokens.places, states)
        return self.comm.all_reduce(y[:num_tokens])

    def _send(self, states: Tensor) -> Tensor:
        self.link.send_states(states)
        return states

    def other_inputs(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, media: MediaEmbeddings | None
    ) -> Rotations:
        """Return what layers read of a step's tokens besides cosines and sines.

        Args:
            positions: of the tokens that this rank attends for.
            hidden: the embedded tokens and images.
        """
        tables: dict[str, TemperatureTable | LogarithmTable | None] = {
            TEMPERATURE: self.temperature,
            LOGARITHM: self.logarithms,
        }
        return {key: (table.at(positions), None) for key, table in tables.items() if table is not None}

    def logits(self, hidden: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """Return this rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        return self.head.forward(hidden, adapted)

    def to_draft_network(self) -> DraftNetwork | None:
        """Return the model for kernels.draft_chain. Returns None if a DraftNetwork cannot represent it."""
        output = None if isinstance(self.head, NoHead) else self.head.whole_weight
        dense = self._dense_layers()
        layers = [layer for layer in dense if layer is not None and layer.has_feed_forward]
        if self.comm.size > 1 or output is None or len(layers) < len(dense):
            return None
        if not isinstance(self.norm, Tensor) or self.stage.count > 1:
            return None
        return DraftNetwork(
            layers=layers,
            rotary_tables=[table.table for table in self.rotary.values()],
            embedding=self.embedding.weight,
            embedding_scale=self.embedding.scale,
            output=output,
            vocab_size=self.head.shard.full_len,
            last_norm=self.norm,
            feeds_normed=True,
            eps=self.layers[-1].norm_eps,
        )

    def _dense_layers(self) -> list[DenseLayer | None]:
        """Return the layers for kernels.decode_layers, and None for those that a DenseLayer cannot represent."""
        return [layer.to_dense_layer(list(self.rotary)) for layer in self.layers]

    def selfcheck(self) -> None:
        """Do nothing: the decoder is written for paged caches."""


class PreviousStage:
    """Stands in for the embedding of a stage after the first: the hidden states that the previous stage sends."""

    def __init__(self, load: LoadContext, hidden_size: int) -> None:
        self._link, self._size = load.link, hidden_size
        self._empty = load.empty

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, E]."""
        return self._link.receive_states(self._empty(len(token_ids), self._size))


def _of_other_stages(load: LoadContext, spec: DecoderSpec) -> list[str]:
    """Return the names of the stored tensors that other stages read."""
    stage = load.stage
    if stage.count == 1:
        return []
    own = stage.part(range(len(spec.layers)))
    others = tuple(
        [f"{spec.names.layers}.{index}." for index in range(len(spec.layers)) if index not in own]
        + ([] if stage.is_first else [f"{spec.names.embedding}."])
        + ([] if stage.is_last else [f"{spec.names.last_norm}.", "lm_head."])
    )

    def is_elsewhere(name: str) -> bool:
        return name.startswith(others)

    load.lora.set_elsewhere(is_elsewhere)
    return [name for name in load.checkpoint.names() if is_elsewhere(name)]


def _cache_indices(layers: Sequence[LayerSpec]) -> list[int]:
    """Return the index of the cache that each layer reads; 0 for layers that read none."""
    starts = accumulate((layer.num_cached for layer in layers), initial=0)
    place = {
        index: start
        for index, (layer, start) in enumerate(zip(layers, starts, strict=False))
        if layer.has_own_kv
    }
    sources = (index if layer.kv_source is None else layer.kv_source for index, layer in enumerate(layers))
    return [place.get(source, 0) for source in sources]


def _reserved_bytes(mixers: Sequence[object]) -> int:
    """Return the memory of steps with long sequences beyond that of the largest steps with short ones."""
    latent = [mixer for mixer in mixers if isinstance(mixer, MlaSpec)]
    if not latent:
        return 0
    return EXPANDED_BYTES if latent[0].indexer is None else EXPANDED_BYTES + SELECTION_BYTES
