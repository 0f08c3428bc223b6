"""StreamsDecoder: decoders whose residual has several streams, mixed by hyper-connections."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from ...proto.model.spec import DecoderSpec, LayerSpec
from ...proto.model.streams import Streams
from ..attention import AttentionInputs, LayerCache
from .aux_states import AuxStates
from .fused_decode import log_op_by_op
from .hyper_connections import HyperConnection, HyperHead, collapse, expand
from .layers import Rotations
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer, FeedForward
from .load_context import LoadContext
from .media_embeddings import MediaEmbeddings
from .mixers.compressed import CompressedAttention, Pages
from .moe.hashed import HashedMixture, has_table
from .output_tokens import OutputTokens

# Key of Rotations |-> the ids of the step's tokens, [T], by which some mixtures choose experts.
_TOKEN_IDS = "token_ids"


class StreamsLayer(DecoderLayer):
    """A layer whose parts each read a sum of the streams, and add their results to all of them."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        self._connections = [
            HyperConnection(load, spec, _own(spec), f"{name}.{part}_hc") for part in ("attn", "ffn")
        ]

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
        weights = of_attention.weigh(streams)
        normed = self.add(None, collapse(streams, weights.before), self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, inputs)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        streams = expand(streams, attended, weights)
        weights = of_mlp.weigh(streams)
        normed = self.add(None, collapse(streams, weights.before), self.before_mlp)
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
    reads_media = False

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        self._num_streams = _own(spec).count
        self._collapse = HyperHead(load, spec, _own(spec), "model.hc_head")
        self._pages = Pages([layer.mixer for layer in spec.layers])
        super().__init__(load, spec, num_positions, has_head=has_head)
        self.supports_outputs = False
        compressed = [own for own in (layer.attention for layer in self.layers) if _has_entries(own)]
        for number, attention in enumerate(compressed):
            attention.attach(self._pages, number, self.rotary[attention.spec.rope])
        self.gathers_keys = True

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
        assert media is None, "images are not read"
        assert aux is None, "the streams have no hidden states for draft heads"
        assert outputs is None
        embedded = self.embedding.forward(token_ids)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            key: table.at(positions) for key, table in self.rotary.items()
        }
        rotations.update(self.other_inputs(token_ids, positions, embedded, media))
        rotations[_TOKEN_IDS] = token_ids, None
        self._pages.bind(kv_caches)
        streams = embedded.unsqueeze(1).expand(-1, self._num_streams, -1).contiguous()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, StreamsLayer)
            streams = layer.forward_streams(streams, rotations, kv_caches[self.cached_by[index]], inputs)
        return self.layers[-1].add(None, self._collapse.forward(streams), self.norm)


def _has_entries(attention: object) -> TypeGuard[CompressedAttention]:
    return isinstance(attention, CompressedAttention)


def _own(spec: DecoderSpec) -> Streams:
    assert isinstance(spec.variant, Streams)
    return spec.variant
