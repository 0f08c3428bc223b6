"""MtpHead: multi-token prediction by a head of the model's own checkpoint (DeepSeek-AI, DeepSeek-V3, 2024)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....kernels.draft_chain import DraftNetwork, HiddenInput
from ....kernels.norm import rms_norm
from ....proto.config import ModelConfig
from ....proto.errors import ConfigError
from ....proto.model.attention import AttentionSpec
from ....proto.model.mla import MlaSpec
from ....proto.model.mtp_layouts import mtp_layout
from ....proto.model.read_spec import read_spec
from ....proto.model.registry import FAMILIES
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache
from ...weights.linear_weight import packed_weight
from ...weights.weight_slice import WeightSlice
from ..llama.decoder import Decoder
from ..llama.decoder_layer import DecoderLayer
from ..load_context import LoadContext
from ..loader import name_tensors
from ..mixers.head_steps import TEMPERATURE
from ..vocab_parallel import NoHead


class MtpHead:
    """One rank of the first head; implements `draft_head.DraftHead`.

    The head shares the embedding, the output layer and the rotary tables of the target model. It is used again for
    each further drafted token. In most layouts the embedding of the token at position 0 counts as zeros, as in
    training. With sparse attention the head has an indexer of its own. The head of a hybrid model has attention, so
    that it keeps no state.

    Raises:
        ConfigError: no layer of the model has attention.
        ModelLoadError: the weights cannot be read, or have other shapes.
    """

    def __init__(self, load: LoadContext, config: ModelConfig, target: Decoder) -> None:
        index = target.num_layers
        spec = read_spec(replace(config, num_layers=index), FAMILIES[config.architecture])
        name_tensors(load, spec, config)
        layout, size = mtp_layout(config), spec.hidden_size

        def named(name: str) -> str:
            return name.format(index=index)

        self.target = target
        self.hidden_size = self.num_features = size
        self.norm_eps = spec.norm_eps
        self.is_hidden_first, self.feeds_normed = layout.hidden_first, layout.feeds_normed
        self.reads_first = layout.reads_first
        self.embedding_norm, self.hidden_norm, self.norm = (
            load.norm(named(name), size, spec.norms.offset)
            for name in (layout.embedding_norm, layout.hidden_norm, layout.final_norm)
        )
        self.projection = load.linear([WeightSlice(named(layout.projection), (size, 2 * size), 0, 0, size)])
        self.layer = DecoderLayer(
            load, spec, _layer_spec(spec, is_dense=layout.is_dense), named(layout.layer)
        )

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
    ) -> Tensor:
        embedded = self.target.embedding.forward(token_ids)
        if not self.reads_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        parts = [
            rms_norm(embedded, self.embedding_norm, self.norm_eps),
            rms_norm(hidden, self.hidden_norm, self.norm_eps),
        ]
        residual = self.projection.multiply(torch.cat(parts[::-1] if self.is_hidden_first else parts, dim=-1))
        assert self.layer.attention is not None
        rope = self.layer.attention.rope
        own = inputs.own(positions)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            rope: (None, None) if rope is None else self.target.rotary[rope].at(own)
        }
        if self.target.temperature is not None:
            rotations[TEMPERATURE] = self.target.temperature.at(own), None
        x = self.layer.forward(None, residual, rotations, kv_caches[0], inputs)
        return self.layer.add(x, residual, self.norm if self.feeds_normed else None)

    def logits(self, hidden: Tensor) -> Tensor:
        if not self.feeds_normed:
            hidden = rms_norm(hidden, self.norm, self.norm_eps)
        return self.target.logits(hidden)

    def to_draft_network(self) -> DraftNetwork | None:
        assert self.layer.attention is not None
        target, rope = self.target, self.layer.attention.rope
        layer = self.layer.to_dense_layer([] if rope is None else [rope])
        output = None if isinstance(target.head, NoHead) else target.head.whole_weight
        projection = packed_weight(self.projection)
        if target.comm.size > 1 or layer is None or output is None or projection is None:
            return None
        if not layer.has_feed_forward or self.reads_first:  # the native op has zeros at position 0
            return None
        return DraftNetwork(
            layers=[layer],
            rotary_tables=[] if rope is None else [target.rotary[rope].table],
            embedding=target.embedding.weight,
            embedding_scale=target.embedding.scale,
            output=output,
            vocab_size=target.head.shard.full_len,
            last_norm=self.norm,
            feeds_normed=self.feeds_normed,
            eps=self.norm_eps,
            hidden_input=HiddenInput(
                combination=None,
                projection=projection,
                embedding_norm=self.embedding_norm,
                hidden_norm=self.hidden_norm,
                is_hidden_first=self.is_hidden_first,
            ),
        )


def _layer_spec(spec: DecoderSpec, *, is_dense: bool) -> LayerSpec:
    """Return the head's layer: the model's last one with attention, and experts if the last of all has some."""
    attending = [own for own in spec.layers if isinstance(own.mixer, AttentionSpec | MlaSpec)]
    if not attending:
        raise ConfigError(
            "speculative_config: method 'mtp' is for models with attention, whose layer a head has"
        )
    layer = replace(attending[-1], has_experts=spec.layers[-1].has_experts and not is_dense)
    if isinstance(layer.mixer, MlaSpec):
        layer = replace(layer, mixer=replace(layer.mixer, has_indexer=layer.mixer.indexer is not None))
    return layer
