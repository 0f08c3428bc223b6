"""AltUpDecoder: Gemma 3n, whose residual has several streams."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.draft_chain import DraftNetwork
from ....kernels.lora import LoraGroups
from ....kernels.norm import rms_norm
from ....proto.model.spec import AltUp, DecoderSpec
from ...attention import AttentionInputs, LayerCache
from ...weights.linear_weight import LinearWeight
from ..aux_states import AuxStates
from ..fused_decode import log_op_by_op
from ..layers import RotaryTable
from ..load_context import LoadContext
from ..output_tokens import OutputTokens
from ..vocab_parallel import NoHead, VocabParallelEmbedding
from .altup import AltUpLayer
from .decoder import make_head
from .per_layer_inputs import PerLayerEmbedding, whole_linear

# The least mean square that a stream is scaled by.
_MIN_SQUARE = 1e-5


class AltUpDecoder:
    """A decoder of AltUpLayers; implements `loader.Model`.

    Args:
        num_positions: length of the rotary tables.
        has_head: the model generates; otherwise it has hidden states only.
    """

    supports_graphs = True
    supports_outputs = False
    reserved_bytes = 0

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, altup: AltUp, num_positions: int, *, has_head: bool = True
    ) -> None:
        assert spec.per_layer_inputs is not None
        self._rotary = {key: RotaryTable(load, rope, num_positions) for key, rope in spec.ropes.items()}
        self._embedding = VocabParallelEmbedding(
            load,
            spec.names.embedding,
            spec.vocab_size,
            spec.hidden_size,
            spec.embedding_scale,
            tied=spec.tied_embeddings and has_head,
        )
        self._per_layer = PerLayerEmbedding(load, spec, spec.per_layer_inputs)
        self._expansions = _read_projections(load, spec, altup, "model.altup_projections")
        self._layers = [
            AltUpLayer(load, spec, altup, index, f"{spec.names.layers}.{index}")
            for index in range(len(spec.layers))
        ]
        self._cached_by = [
            index if layer.kv_source is None else layer.kv_source for index, layer in enumerate(spec.layers)
        ]
        self._reductions = _read_projections(load, spec, altup, "model.altup_unembed_projections")
        log_op_by_op(load.device, "its residual has several streams")
        self._norm, self._eps = load.norm(spec.names.last_norm, spec.hidden_size), spec.norm_eps
        self.head = make_head(load, spec, self._embedding) if has_head else NoHead(load, spec.vocab_size)
        load.checkpoint.check_all_read(ignoring=["lm_head.weight"] if spec.tied_embeddings else [])

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E]."""
        assert aux is None, "the streams of Gemma 3n have no hidden states for draft heads"
        assert outputs is None
        embedded = self._embedding.forward(token_ids)
        layer_inputs = self._per_layer.forward(token_ids, embedded)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            key: table.at(positions) for key, table in self._rotary.items()
        }
        expanded = [_scale_like(own.multiply(embedded), embedded) for own in self._expansions]
        streams = torch.stack((embedded, *expanded), dim=1)
        for index, layer in enumerate(self._layers):
            kv_cache = kv_caches[self._cached_by[index]]
            streams = layer.forward(streams, rotations, kv_cache, inputs, layer_inputs[:, index])
        first, *others = streams.unbind(1)
        reduced = [
            _scale_like(own.multiply(stream.contiguous()), first)
            for own, stream in zip(self._reductions, others, strict=True)
        ]
        return rms_norm(torch.stack((first, *reduced)).mean(dim=0), self._norm, self._eps)

    def logits(self, hidden: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """Return this rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        return self.head.forward(hidden, adapted)

    def to_draft_network(self) -> DraftNetwork | None:
        """Return None: a DraftNetwork has one stream."""
        return None

    def selfcheck(self) -> None:
        """Do nothing: the decoder is written for paged caches."""


def _read_projections(load: LoadContext, spec: DecoderSpec, altup: AltUp, name: str) -> list[LinearWeight]:
    """Read the matrices between the hidden state and the streams but the first."""
    size = spec.hidden_size
    return [whole_linear(load, f"{name}.{index}", size, size) for index in range(altup.num_streams - 1)]


def _scale_like(x: Tensor, like: Tensor) -> Tensor:
    """Scale x, [T, E], to the mean square of `like`."""
    square = x.square().mean(dim=-1, keepdim=True).clamp_(min=_MIN_SQUARE)
    return x * like.square().mean(dim=-1, keepdim=True).sqrt() / square.sqrt()
