"""Decoder: Llama and related architectures; a DecoderSpec holds their differences."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from ...kernels.all_reduce_norm import Peers, all_reduce_add_rms_norm
from ...kernels.attention_variant import AttentionVariant
from ...kernels.decode_layers import DenseLayer, LayerAdapters
from ...kernels.draft_chain import DraftNetwork
from ...kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ...kernels.latent_attention import EXPANDED_BYTES
from ...kernels.lora import LoraGroups
from ...kernels.norm import add_rms_norm, add_rms_norm_float8, rms_norm
from ...kernels.quantized_linear import Float8Tokens
from ...kernels.rope import apply_rope
from ...kernels.sparse_latent import SELECTION_BYTES
from ..attention import AttentionInputs, LayerCache, paged_attention
from ..comm.all_reduce_choice import choose_all_reduce
from ..comm.symmetric_memory import open_symmetric_memory
from ..output_tokens import OutputTokens
from ..weights.linear_weight import packed_weight
from ..weights.weight_slice import Interleaving
from .aux_states import AuxStates
from .expert_layout import other_experts
from .experts_beside_dense import ExpertsBesideDense
from .fused_decode import FusedDecode, log_op_by_op, plan_fused_decode
from .latent_layer import LatentAttention
from .layers import (
    TEMPERATURE,
    ColumnParallelLinear,
    LayerNorm,
    PartialSum,
    Projection,
    RotaryTable,
    Rotations,
    RowParallelLinear,
    TemperatureTable,
    WholeProjectionNorm,
)
from .load_context import LoadContext
from .mlp import Mlp, UngatedMlp
from .moe import MixtureOfExperts, are_separate
from .per_layer_inputs import LayerEnd, PerLayerEmbedding
from .shared_attention import SharedAttention
from .spec import DecoderSpec, LayerSpec
from .vocab_parallel import NoHead, VocabParallelEmbedding, VocabParallelHead

# The weight of an RMSNorm, or a LayerNorm.
Norm = Tensor | LayerNorm

_log = logging.getLogger(__name__)


class Attention:
    """Self-attention over the paged cache; each rank computes its part of the heads.

    Args:
        in_features: of the input; None for the hidden size.
    """

    def __init__(
        self,
        load: LoadContext,
        spec: DecoderSpec,
        layer: LayerSpec,
        name: str,
        peers: Peers | None,
        in_features: int | None = None,
    ) -> None:
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.norm_eps = spec.norm_eps
        self.rope = layer.rope
        sinks = None
        if spec.attention_sinks:
            sinks = load.part(f"{name}.sinks", load.head_shard(spec.num_heads, 1)).float()
        temperature = spec.query_temperature
        self.has_temperature = temperature is not None and temperature.of_rotated == (layer.rope is not None)
        self.variant = AttentionVariant(
            window=layer.window, chunk=layer.chunk, soft_cap=spec.attention_soft_cap, sinks=sinks
        )
        self.qkv = ColumnParallelLinear(
            load,
            _qkv_projections(load, spec, layer, name),
            in_features or spec.hidden_size,
            bias=spec.qkv_bias,
        )
        q_size = spec.num_heads * spec.head_dim
        output = f"{name}.{spec.names.attention_output}"
        self.output = RowParallelLinear(load, output, q_size, spec.hidden_size, spec.output_bias, peers)
        self.rotates_first = spec.qk_norm in ("rotated_head", "rotated_unweighted")
        self.q_norm = self.k_norm = None
        if spec.qk_norm in ("head", "rotated_head"):
            self.q_norm, self.k_norm = (
                load.norm(f"{name}.{own}", spec.head_dim, spec.norm_offset) for own in spec.qk_norm_names
            )
        if spec.qk_norm == "rotated_unweighted" and layer.rope is not None:
            self.q_norm = self.k_norm = load.empty(spec.head_dim).fill_(1)
        self.value_norm: Tensor | None = load.empty(spec.head_dim).fill_(1) if spec.value_norm else None
        self.layer_norms = _head_layer_norms(load, spec, layer, name) if spec.qk_norm == "layer_norm" else []
        self.projection_norms = _projection_norms(load, spec, name) if spec.qk_norm == "projection" else []

    def forward(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        queries: Tensor | None = None,
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens' keys and values to the cache before attention reads them.

        Args:
            queries: [N] int64, the tokens that `inputs` has as queries; the result is [N, E]. None for all.
        """
        inputs = inputs.of_group(kv_cache.group)
        projected = self.qkv.forward(x)
        num_tokens = projected.shape[0]
        start = 0
        for norm in self.projection_norms:
            norm.apply(projected[:, start : start + norm.length])
            start += norm.length
        heads = projected.view(num_tokens, -1, self.head_dim)
        start = 0
        for layer_norm in self.layer_norms:
            own = heads[:, start : start + len(layer_norm.weight)]
            own.copy_(layer_norm.apply(own))
            start += len(layer_norm.weight)
        if self.has_temperature:
            factors, _ = rotations[TEMPERATURE]
            assert factors is not None
            heads[:, : -2 * kv_cache.blocks.shape[2]] *= factors
        if self.value_norm is not None:
            values = heads[:, -kv_cache.blocks.shape[2] :]
            values.copy_(rms_norm(values, self.value_norm, self.norm_eps))
        cos, sin = rotations[self.rope]
        if self.rotates_first and cos is not None and sin is not None:
            apply_rope(heads[:, : -kv_cache.blocks.shape[2]], cos, sin)
            cos = sin = None
        q = fused_qk_norm_rope_kv_write(
            heads,
            kv_cache.blocks,
            inputs.slot_mapping,
            cos,
            sin,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            kv_cache.scales,
        )
        if queries is not None:
            q = q.index_select(0, queries)
        attended = paged_attention(q, kv_cache, inputs, self.scale, self.variant)
        return self.output.forward_partial(attended.view(len(q), -1))


class DecoderLayer:
    """Attention and feed-forward network, each added to the residual, with norms before, after, or both.

    Args:
        peers: memory for fused all-reduces. It is used only if the residual addition directly follows the sum.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str, peers: Peers | None
    ) -> None:
        def norm(own_name: str | None) -> Norm | None:
            return None if own_name is None else _read_norm(load, spec, f"{name}.{own_name}")

        is_plain = spec.residual_scale == 1.0 and spec.norm_kind == "rms" and not spec.parallel_residual
        if not is_plain or spec.norms.after_attention or spec.norms.after_mlp:
            peers = None
        self.comm, self.peers = load.comm, peers
        self.norm_eps = spec.norm_eps
        self.residual_scale = spec.residual_scale
        self.before_attention = norm(spec.norms.before_attention)
        make_attention = _attention_of(spec, layer)
        self.attention = make_attention(load, spec, layer, f"{name}.{spec.names.attention}", peers)
        self.after_attention = norm(spec.norms.after_attention)
        is_beside_dense = layer.has_experts and spec.experts is not None and spec.experts.beside_dense
        self.before_mlp = None if is_beside_dense else norm(spec.norms.before_mlp)
        self.is_parallel = spec.parallel_residual
        self.mlp: Mlp | UngatedMlp | MixtureOfExperts | ExpertsBesideDense
        if layer.has_experts:
            assert spec.experts is not None
            if is_beside_dense:
                self.mlp = ExpertsBesideDense(load, spec, spec.experts, name)
            else:
                self.mlp = MixtureOfExperts(load, spec.experts, spec.hidden_size, spec.activation, name)
        elif spec.mlp_names is not None:
            self.mlp = UngatedMlp(load, spec, spec.mlp_names, f"{name}.{spec.names.mlp}", peers)
        else:
            self.mlp = Mlp(load, spec, f"{name}.{spec.names.mlp}", peers)
        self.after_mlp = norm(spec.norms.after_mlp)

    @property
    def reads_back(self) -> bool:
        """True if `forward` reads values back from the device."""
        return isinstance(self.mlp, MixtureOfExperts | ExpertsBesideDense) and self.mlp.reads_back

    @property
    def has_separate_experts(self) -> bool:
        """True if the experts of tokens without an adapter are multiplied one by one."""
        return isinstance(self.mlp, MixtureOfExperts | ExpertsBesideDense) and are_separate(self.mlp.experts)

    def forward(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum:
        """Compute the layer; each residual addition is fused with the norm that follows it.

        Args:
            x: output of the previous layer, still to be added to `residual`; None for the first layer.
            residual: [T, E]; updated in place.

        Returns:
            the layer's output, still to be added to `residual`, [T, E].
        """
        if self.is_parallel:
            return self._forward_parallel(x, residual, rotations, kv_cache, inputs)
        normed = self._add_and_quantize(self.attention.qkv, x, residual, self.before_attention)
        return self._feed_forward(self.attention.forward(normed, rotations, kv_cache, inputs), residual)

    @property
    def supports_outputs(self) -> bool:
        """Return whether the layer can compute the output of some tokens only."""
        return isinstance(self.attention, Attention) and not self.is_parallel

    def forward_outputs(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        outputs: OutputTokens,
    ) -> tuple[Tensor | PartialSum, Tensor]:
        """As `forward`, but only keys and values are computed for all tokens; requires `supports_outputs`.

        Returns:
            the layer's output and the residual of these tokens, each [N, E].
        """
        assert isinstance(self.attention, Attention)
        normed = self._add_and_quantize(self.attention.qkv, x, residual, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, outputs.inputs, outputs.index)
        residual = residual.index_select(0, outputs.index)
        return self._feed_forward(attended, residual), residual

    def forward_mixture(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the experts' result, [T, E], before the norm and the scale that follow; add to the residual.

        Args:
            attended: result of the attention, all ranks' sum, before the norm and the scale that follow.
        """
        x = self.mlp.forward(
            self.add(self._finish(attended, self.after_attention), residual, self.before_mlp)
        )
        assert isinstance(x, Tensor)  # the sum of experts is not deferred
        return x

    def _feed_forward(self, attended: Tensor | PartialSum, residual: Tensor) -> Tensor | PartialSum:
        x = self._finish(attended, self.after_attention)
        if isinstance(self.mlp, Mlp):
            x = self.mlp.forward(self._add_and_quantize(self.mlp.gate_up, x, residual, self.before_mlp))
        else:
            x = self.mlp.forward(self.add(x, residual, self.before_mlp))
        return self._finish(x, self.after_mlp)

    def _forward_parallel(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """As `forward`, with the same input for attention and feed-forward network."""
        normed = self.add(x, residual, self.before_attention)
        attended, out = self.attention.forward(normed, rotations, kv_cache, inputs), self.mlp.forward(normed)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        assert isinstance(out, Tensor)
        return out.add_(attended)

    def to_dense_layer(self, ropes: Sequence[str]) -> DenseLayer | None:
        """Return the layer for kernels.decode_layers. Returns None if a DenseLayer cannot represent it.

        That of a mixture of experts has no feed-forward network; see `forward_mixture`.

        Args:
            ropes: keys of the model's rotary embeddings; a DenseLayer refers to them by index.
        """
        norms = self.before_attention, self.before_mlp, self.after_attention, self.after_mlp
        if self.peers is not None or not isinstance(self.attention, Attention):
            return None
        own = self.attention.qkv.lora, self.attention.output.lora
        is_mixture = isinstance(self.mlp, MixtureOfExperts) and not any(own)
        if not isinstance(self.mlp, Mlp) and not is_mixture:
            return None
        mlp = self.mlp if isinstance(self.mlp, Mlp) else None
        return make_dense_layer(self.attention, mlp, norms, self.norm_eps, ropes, self.residual_scale)

    def _add_and_quantize(
        self,
        consumer: ColumnParallelLinear,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        norm: Norm | None,
    ) -> Tensor | Float8Tokens:
        """As `add`, but the norm quantizes its output if `consumer` multiplies in float8; no extra memory pass."""
        if consumer.accepts_float8 and isinstance(x, Tensor) and isinstance(norm, Tensor):
            return Float8Tokens(*add_rms_norm_float8(x, residual, norm, self.norm_eps), x.dtype)
        return self.add(x, residual, norm)

    def add(self, x: Tensor | PartialSum | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Add x, if any, to the residual; return the residual, normalized if there is a norm."""
        if isinstance(x, PartialSum):
            if isinstance(norm, Tensor) and self.peers is not None:
                return all_reduce_add_rms_norm(x.part, residual, norm, self.norm_eps, self.peers)
            x = self.comm.all_reduce(x.part)
        if norm is None:
            return residual if x is None else residual.add_(x)
        if isinstance(norm, LayerNorm):
            return norm.apply(residual if x is None else residual.add_(x))
        if x is None:
            return rms_norm(residual, norm, self.norm_eps)
        return add_rms_norm(x, residual, norm, self.norm_eps)

    def input_of(self, x: Tensor | PartialSum | None, residual: Tensor) -> Tensor:
        """Return the hidden state that `forward` gets in two parts, [T, E], and leave these unchanged."""
        if isinstance(x, PartialSum):
            x = self.comm.all_reduce(x.part.clone())
        return residual.clone() if x is None else residual + x

    def _finish(self, x: Tensor | PartialSum, norm: Norm | None) -> Tensor | PartialSum:
        """Apply the norm and the scale that precede the residual addition, if the layer has them."""
        if isinstance(x, PartialSum):
            return x
        if norm is not None:
            x = norm.apply(x) if isinstance(norm, LayerNorm) else rms_norm(x, norm, self.norm_eps)
        return x if self.residual_scale == 1.0 else x.mul_(self.residual_scale)


def make_dense_layer(
    attention: Attention,
    mlp: Mlp | None,
    norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None],
    eps: float,
    ropes: Sequence[str],
    residual_scale: float = 1.0,
) -> DenseLayer | None:
    """Return a layer for kernels.decode_layers. Returns None if a DenseLayer cannot represent it.

    Args:
        mlp: None if the caller computes it.
        norms: before attention, before the feed-forward network, and after each.
        ropes: as for DecoderLayer.to_dense_layer.
    """
    before_attention, before_mlp, after_attention, after_mlp = norms
    if not isinstance(before_attention, Tensor) or not isinstance(before_mlp, Tensor):
        return None
    if isinstance(after_attention, LayerNorm) or isinstance(after_mlp, LayerNorm):
        return None
    has_more = (
        bool(attention.projection_norms)
        or bool(attention.layer_norms)
        or attention.rotates_first
        or attention.value_norm is not None
        or attention.has_temperature
        or attention.variant.chunk > 0
        or attention.variant.sinks is not None
        or attention.output.bias is not None
    )
    qkv, output = packed_weight(attention.qkv.weight), packed_weight(attention.output.weight)
    if has_more or qkv is None or output is None:
        return None
    gate_up = down = None
    if mlp is not None:
        gate_up, down = packed_weight(mlp.gate_up.weight), packed_weight(mlp.down.weight)
        if gate_up is None or down is None or mlp.down.bias is not None:
            return None
    return DenseLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        qkv_bias=attention.qkv.bias,
        gate_up_bias=None if mlp is None else mlp.gate_up.bias,
        before_attention=before_attention,
        before_mlp=before_mlp,
        after_attention=after_attention,
        after_mlp=after_mlp,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        eps=eps,
        residual_scale=residual_scale,
        rope=None if attention.rope is None else ropes.index(attention.rope),
        gate="silu" if mlp is None else mlp.activation,
        head_dim=attention.head_dim,
        scale=attention.scale,
        variant=attention.variant,
        adapters=None if mlp is None else _layer_adapters(attention, mlp),
    )


def _layer_adapters(attention: Attention, mlp: Mlp) -> LayerAdapters | None:
    layers = attention.qkv, attention.output, mlp.gate_up, mlp.down
    factors = [None if layer.lora is None else layer.lora.factors for layer in layers]
    return LayerAdapters(*factors) if any(factors) else None


class Decoder:
    """A decoder-only model; implements `loader.Model`.

    Args:
        num_positions: length of the rotary tables.
        has_head: the model generates; otherwise it has hidden states only.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        # The ranks meet here, so before any weights are read: they read at different speeds.
        peers = None
        if load.fused_all_reduce:
            peers = open_symmetric_memory(load.comm, spec.hidden_size, load.dtype, load.device)
            choose_all_reduce(peers, load.comm)
        self.rotary = {key: RotaryTable(load, rope, num_positions) for key, rope in spec.ropes.items()}
        self.temperature: TemperatureTable | None = None
        if spec.query_temperature is not None:
            self.temperature = TemperatureTable(load, spec.query_temperature, num_positions)
        self.embedding = VocabParallelEmbedding(
            load,
            spec.names.embedding,
            spec.vocab_size,
            spec.hidden_size,
            spec.embedding_scale,
            tied=spec.tied_embeddings and has_head,
        )
        self.layers = [
            DecoderLayer(load, spec.of_layer(layer), layer, f"{spec.names.layers}.{index}", peers)
            for index, layer in enumerate(spec.layers)
        ]
        # Index of the layer whose cache each layer reads.
        self.cached_by = [
            index if layer.kv_source is None else layer.kv_source for index, layer in enumerate(spec.layers)
        ]
        self.per_layer_embedding: PerLayerEmbedding | None = None
        if spec.per_layer_inputs is not None:
            self.per_layer_embedding = PerLayerEmbedding(load, spec, spec.per_layer_inputs)
        self.layer_ends: list[LayerEnd] = []
        if spec.per_layer_inputs is not None or spec.layer_scalars:
            names = (f"{spec.names.layers}.{index}" for index in range(len(spec.layers)))
            self.layer_ends = [LayerEnd(load, spec, name) for name in names]
        self.comm, self.lora = load.comm, load.lora
        self.hidden_size = spec.hidden_size
        self.reserved_bytes = _reserved_bytes(spec)
        self.supports_graphs = not any(layer.reads_back for layer in self.layers)
        self.supports_outputs = self.layers[-1].supports_outputs
        self.norm = _read_norm(load, spec, spec.names.last_norm)
        self.fused_decode = self._plan_fused_decode(load)
        if any(layer.has_separate_experts for layer in self.layers):
            _log.warning(
                "experts are multiplied one by one, which is slower: no op takes their weights together"
            )
        self.head = make_head(load, spec, self.embedding) if has_head else NoHead(load, spec.vocab_size)
        # Some checkpoints store the head even though it is tied.
        unused = [name for name in load.checkpoint.names() if name.startswith(spec.draft_prefixes)]
        if spec.tied_embeddings or not has_head:
            unused.append("lm_head.weight")
        if spec.experts is not None:
            unused += other_experts(load, spec.experts)
        load.checkpoint.check_all_read(ignoring=unused)

    def _plan_fused_decode(self, load: LoadContext) -> FusedDecode | None:
        if not isinstance(self.norm, Tensor):
            log_op_by_op(load.device, "its norms are no RMSNorm")
            return None
        mixtures = [
            layer.forward_mixture if isinstance(layer.mlp, MixtureOfExperts) else None
            for layer in self.layers
        ]
        return plan_fused_decode(self._dense_layers(), mixtures, self.norm, load.comm)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E] or [N, E]; add those between layers to `aux`."""
        hidden = self.embedding.forward(token_ids)
        rotated = {key: table.at(inputs.own(positions)) for key, table in self.rotary.items()}
        fused = self.fused_decode
        if fused is not None and fused.supports(len(hidden), inputs):
            groups = None if self.lora is None else self.lora.groups
            return fused.forward(hidden, list(rotated.values()), kv_caches, inputs, aux, groups)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {None: (None, None)}
        rotations.update(rotated.items())
        if self.temperature is not None:
            rotations[TEMPERATURE] = self.temperature.at(positions), None
        x: Tensor | PartialSum | None = None
        layer_inputs = None
        if self.per_layer_embedding is not None:
            layer_inputs = self.per_layer_embedding.forward(token_ids, hidden)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kv_cache = kv_caches[self.cached_by[index]]
            if aux is not None and index in aux.layers:
                aux.states.append(layer.input_of(x, hidden))
            if outputs is not None and index == last:
                x, hidden = layer.forward_outputs(x, hidden, rotations, kv_cache, outputs)
                layer_inputs = None if layer_inputs is None else layer_inputs.index_select(0, outputs.index)
            else:
                x = layer.forward(x, hidden, rotations, kv_cache, inputs)
            if self.layer_ends:
                assert isinstance(x, Tensor)  # a norm follows the feed-forward network
                own = None if layer_inputs is None else layer_inputs[:, index]
                x = self.layer_ends[index].forward(x, hidden, own)
        if aux is not None and len(self.layers) in aux.layers:
            aux.states.append(self.layers[-1].input_of(x, hidden))
        return self.layers[-1].add(x, hidden, self.norm)

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
        if not isinstance(self.norm, Tensor):
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
        if self.layer_ends:
            return [None] * len(self.layers)
        return [layer.to_dense_layer(list(self.rotary)) for layer in self.layers]

    def selfcheck(self) -> None:
        """Do nothing: the decoder is written for paged caches."""


def _attention_of(
    spec: DecoderSpec, layer: LayerSpec
) -> type[Attention] | type[LatentAttention] | type[SharedAttention]:
    if layer.kv_source is not None:
        return SharedAttention
    return Attention if spec.latent is None else LatentAttention


def _reserved_bytes(spec: DecoderSpec) -> int:
    """Return the memory of steps with long sequences beyond that of the largest steps with short ones."""
    if spec.latent is None:
        return 0
    return EXPANDED_BYTES if spec.latent.indexer is None else EXPANDED_BYTES + SELECTION_BYTES


def make_head(load: LoadContext, spec: DecoderSpec, embedding: VocabParallelEmbedding) -> VocabParallelHead:
    """Return the head of a model that generates."""
    return VocabParallelHead(
        load,
        "lm_head",
        spec.hidden_size,
        spec.vocab_size,
        tied=embedding if spec.tied_embeddings else None,
        bias=spec.head_bias,
        scale=spec.logits_scale,
        soft_cap=spec.logits_soft_cap,
    )


def _read_norm(load: LoadContext, spec: DecoderSpec, name: str) -> Norm:
    weight = load.norm(name, spec.hidden_size, spec.norm_offset)
    if spec.norm_kind == "rms":
        return weight
    bias = load.replicated(f"{name}.bias", spec.hidden_size) if spec.norm_kind == "layer" else None
    return LayerNorm(weight, bias, spec.norm_eps)


def _interleaving(spec: DecoderSpec, layer: LayerSpec) -> Interleaving | None:
    """Return the order of the rows of a head's queries and keys in the checkpoint."""
    if not spec.interleaved_rope or layer.rope is None:
        return None
    return Interleaving(spec.head_dim, 2 * len(spec.ropes[layer.rope].frequencies))


def _qkv_projections(load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> list[Projection]:
    counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    shards = [load.head_shard(count, spec.head_dim) for count in counts]
    if not spec.fused_qkv:
        interleaving = _interleaving(spec, layer)
        parts = "qkk" if layer.values_are_keys else "qkv"
        return [
            Projection(f"{name}.{part}_proj", shard, interleaving=None if place == 2 else interleaving)
            for place, (part, shard) in enumerate(zip(parts, shards, strict=True))
        ]
    stored_len = sum(counts) * spec.head_dim
    starts = [sum(counts[:index]) * spec.head_dim for index in range(3)]
    return [
        Projection(f"{name}.qkv_proj", shard, start, stored_len)
        for shard, start in zip(shards, starts, strict=True)
    ]


def _head_layer_norms(load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> list[LayerNorm]:
    """Return the norms of queries and of keys, with weights for each of this rank's heads."""
    interleaving, head_dim = _interleaving(spec, layer), spec.head_dim
    norms = []
    for own, count in zip(spec.qk_norm_names, (spec.num_heads, spec.num_kv_heads), strict=True):
        heads = load.head_shard(count, 1)
        weight = load.empty(len(heads), head_dim)
        if "{}" in own:
            for row, head in zip(weight, range(heads.start, heads.end), strict=True):
                load.checkpoint.read_into(row, f"{name}.{own.format(head)}.weight", (head_dim,))
            for head in range(count):
                load.checkpoint.ignore(f"{name}.{own.format(head)}.weight")
        else:
            load.checkpoint.read_into(weight, f"{name}.{own}.weight", (count, head_dim), 0, heads.start)
        if interleaving is not None:
            weight = interleaving.reorder(weight, dim=1)
        norms.append(LayerNorm(weight, None, spec.norm_eps))
    return norms


def _projection_norms(load: LoadContext, spec: DecoderSpec, name: str) -> list[WholeProjectionNorm]:
    """Return the norms over all queries and over all keys."""
    return [
        WholeProjectionNorm(load, f"{name}.{own}_norm", load.head_shard(count, spec.head_dim), spec.norm_eps)
        for own, count in (("q", spec.num_heads), ("k", spec.num_kv_heads))
    ]
