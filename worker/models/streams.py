"""StreamsDecoder: decoders whose residual has several streams, mixed by hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from ...proto.model.gated_delta import GatedDeltaSpec
from ...proto.model.ngrams import NUM_NGRAM_TENSORS
from ...proto.model.spec import DecoderSpec, LayerSpec
from ...proto.model.streams import GatedStreams, Streams
from ..attention import AttentionInputs, LayerCache
from .aux_states import AuxStates
from .fused_decode import log_op_by_op
from .hyper_connections import Connection, GatedResidual, Head, HyperConnection, HyperHead, MeanHead, expand
from .layers import Rotations
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer, FeedForward
from .load_context import LoadContext
from .media_embeddings import MediaEmbeddings
from .mixers.compressed import CompressedAttention
from .mixers.pages import Pages
from .mixers.pooled_mla import PooledMlaAttention
from .mixers.state_mixer import StateMixer
from .moe.hashed import HashedMixture, has_table
from .ngrams import NgramEmbedding
from .output_tokens import OutputTokens

# Key of Rotations |-> the ids of the step's tokens, [T], by which some mixtures choose experts.
_TOKEN_IDS = "token_ids"


class StreamsLayer(DecoderLayer):
    """A layer whose parts each read a sum of the streams, and add their results to all of them."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        self._connections = self.make_connections(load, spec, name)

    def make_connections(self, load: LoadContext, spec: DecoderSpec, name: str) -> Sequence[Connection]:
        """Return what connects attention and feed-forward network of the layer `name` with the streams."""
        assert isinstance(spec.variant, Streams)
        return [HyperConnection(load, spec, spec.variant, f"{name}.{part}_hc") for part in ("attn", "ffn")]

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        """Return the feed-forward network of the layer `name`."""
        if spec.experts is not None and layer.has_experts and has_table(load.checkpoint, name):
            return HashedMixture(load, spec, name)
        return super().make_mlp(load, spec, layer, name)

    def forward_streams(
        self, streams: Tensor, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """[T, N, E] -> [T, N, E]."""
        assert self.attention is not None
        assert self.mlp is not None
        of_attention, of_mlp = self._connections
        x, weights = of_attention.read(streams)
        normed = self.add(None, x, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, inputs)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        streams = expand(streams, attended, weights)
        x, weights = of_mlp.read(streams)
        normed = self.add(None, x, self.before_mlp)
        if isinstance(self.mlp, HashedMixture):
            token_ids, _ = rotations[_TOKEN_IDS]
            assert token_ids is not None
            return expand(streams, self.mlp.forward_tokens(normed, token_ids), weights)
        out = self.mlp.forward(normed)
        assert isinstance(out, Tensor)
        return expand(streams, out, weights)


class StreamsDecoder(Decoder):
    """A decoder of StreamsLayers."""

    layer_class = StreamsLayer

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        assert isinstance(spec.variant, Streams | GatedStreams)
        self._num_streams = spec.variant.count
        self._collapse = self.make_collapse(load, spec)
        self._pages = Pages([layer.mixer for layer in spec.layers])
        super().__init__(load, spec, num_positions, has_head=has_head)
        self.supports_outputs = False
        mixers = [layer.attention for layer in self.layers]
        for number, attention in enumerate(filter(_has_entries, mixers)):
            assert attention.rope is not None
            attention.attach(self._pages, number, self.rotary[attention.rope])
        # Keys of pools alone are read by kernels.
        self.gathers_keys = not any(isinstance(own, PooledMlaAttention) for own in mixers)

    def make_collapse(self, load: LoadContext, spec: DecoderSpec) -> Head:
        """Return what makes one hidden state of the streams."""
        assert isinstance(spec.variant, Streams)
        if spec.variant.averages:
            return MeanHead()
        return HyperHead(load, spec, spec.variant, "model.hc_head")

    def _plan_fused_decode(self, load: LoadContext) -> None:
        log_op_by_op(load.device, "its residual has several streams")

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
        """Return hidden states after the last norm, [T, E]."""
        assert aux is None, "the streams have no hidden states for draft heads"
        assert outputs is None
        embedded = self.embedding.forward(token_ids)
        if media is not None:
            embedded.index_copy_(0, media.index, media.rows)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            key: table.at(positions) for key, table in self.rotary.items()
        }
        rotations.update(self.other_inputs(token_ids, positions, embedded, media))
        rotations[_TOKEN_IDS] = token_ids, None
        self._pages.bind(kv_caches)
        streams = embedded.unsqueeze(1).expand(-1, self._num_streams, -1).contiguous()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, StreamsLayer)
            streams = layer.forward_streams(streams, rotations, self._cache_of(index, kv_caches), inputs)
        return self.layers[-1].add(None, self._collapse.forward(streams), self.norm)


def _has_entries(attention: object) -> TypeGuard[CompressedAttention | PooledMlaAttention]:
    return isinstance(attention, CompressedAttention | PooledMlaAttention)


class GatedStreamsLayer(StreamsLayer):
    """A layer whose parts read gated streams, to which it may add n-grams before."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        own = layer.mixer.ngrams if isinstance(layer.mixer, GatedDeltaSpec) else None
        self._ngrams = None if own is None else NgramEmbedding(load, spec, own, f"{name}.ple")

    def make_connections(self, load: LoadContext, spec: DecoderSpec, name: str) -> Sequence[Connection]:
        """Return what connects attention and feed-forward network of the layer `name` with the streams."""
        assert isinstance(spec.variant, GatedStreams)
        parts = [f"{name}.{part}_hyper_connection" for part in ("attn", "mlp")]
        return [GatedResidual(load, spec, spec.variant, part) for part in parts]

    def forward_streams(
        self, streams: Tensor, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """[T, N, E] -> [T, N, E]."""
        if self._ngrams is not None:
            assert isinstance(self.attention, StateMixer)
            assert inputs.states is not None
            token_ids, _ = rotations[_TOKEN_IDS]
            assert token_ids is not None
            states = inputs.states.layers[self.attention.layer][-NUM_NGRAM_TENSORS:]
            streams = streams + self._ngrams.forward(streams, token_ids, states, inputs.states.runs)
        return super().forward_streams(streams, rotations, kv_cache, inputs)


class GatedStreamsDecoder(StreamsDecoder):
    """A decoder of GatedStreamsLayers, whose last norm is that of the streams."""

    layer_class = GatedStreamsLayer

    def make_collapse(self, load: LoadContext, spec: DecoderSpec) -> Head:
        """Return what makes one hidden state of the streams."""
        assert isinstance(spec.variant, GatedStreams)
        return GatedResidual(load, spec, spec.variant, "model.hyper_connection_mixer", has_result=False)

    def read_last_norm(self, load: LoadContext, spec: DecoderSpec) -> None:
        """Return None."""
