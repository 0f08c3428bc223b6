"""DecoderSpec: the differences between decoder architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .rope import Rope

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class Norms:
    """Checkpoint names of a layer's norms; None if the layer has no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names of a decoder's parts; those of attention and feed-forward network are within a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    last_norm: str = "model.norm"


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts that replaces a feed-forward network (Shazeer et al., 2017; Jiang et al., 2024).

    Attributes:
        count: number of experts.
        top_k: experts per token (top k of the router).
        intermediate_size: size of one expert.
        normalized: scale the weights of a token's experts to sum to 1.
        score: function of the router's logits: ``softmax`` over all experts, ``softmax_of_chosen`` or
            ``sigmoid_of_chosen`` over the chosen ones, ``sigmoid`` of each, or ``sparsemixer`` (see `jitter`).
        router_bias: the router's linear layer has a bias.
        num_groups, num_top_groups: a token's experts are chosen from its best `num_top_groups` of `num_groups` groups
            of equal size (group-limited routing; DeepSeek-AI, *DeepSeek-V2*, 2024).
        group_score: score of a group: that of its best expert, ``max``, or the sum of its best two, ``top2``.
        correction_bias: a stored bias per expert is added to the scores that experts are chosen by, but not to their
            weights (DeepSeek-AI, *DeepSeek-V3*, 2024).
        scale: multiplies the weights of a token's experts.
        shared_intermediate_size: of a feed-forward network that every token passes besides its experts; 0 for none.
        shared_bias: the projections of that network have biases.
        shared_gate: each token's result of that network is multiplied by the sigmoid of a linear layer.
        interleaved: the experts are stored as in gpt-oss: rows of gate and up alternate, and all layers have biases.
        transposed: stacks of all experts store each matrix as [inputs, outputs].
        scaled_inputs: a token's weights multiply the inputs of its experts instead of their results.
        beside_dense: the result is added to that of the layer's dense network, each with norms of its own.
        clamp: `alpha` and `limit` of kernels.activation.clamped_silu_and_mul; None for the model's own activation.
        jitter: of sparsemixer: experts whose logits are within twice this part of the best one's share its softmax.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalized: bool
    score: str = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    num_top_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    scale: float = 1.0
    shared_intermediate_size: int = 0
    shared_bias: bool = False
    shared_gate: bool = False
    interleaved: bool = False
    transposed: bool = False
    scaled_inputs: bool = False
    beside_dense: bool = False
    clamp: tuple[float, float] | None = None
    jitter: float = 0.0


# Time of a product with a latent that one query has chosen, in products with keys that all queries of a tile share.
# Measured on a CPU: 0.7 to 1.5.
CHOSEN_COST = 1.5


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Sizes of the indexer of sparse latent attention (DeepSeek-AI, *DeepSeek-V3.2*, 2025).

    Attributes:
        num_heads, head_dim: Hi heads, which share one key of I numbers per token.
        top_k: tokens that a query attends to at most.
        interleaved: numbers 2 i and 2 i + 1 of the rotated part, which comes first, are a pair.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Sizes of multi-head latent attention (DeepSeek-AI, *DeepSeek-V2*, 2024).

    Attributes:
        rank: C, numbers of the latent that a token's keys and values are computed from.
        query_rank: numbers of the latent that its queries are computed from; None if they have none.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V, numbers of a head's own part of a key, of the
            rotated part that all heads share, and of a value.
        interleaved: numbers 2 i and 2 i + 1 of the rotated part are a pair.
        indexer: of sparse attention; None for attention to all tokens.
    """

    rank: int
    query_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    indexer: IndexerSpec | None = None

    @property
    def qk_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attended_dim(self) -> int:
        """Numbers of a token that queries of all heads attend to; the key of an indexer is cached behind them."""
        return self.rank + self.qk_rope_head_dim

    def expansion_is_cheaper(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
        """Return whether chunks take less time with keys and values than with latents, by the number of products.

        With 512 + 64 numbers per latent and 128 + 64 + 128 of a head: from 171 queries per sequence on. With an
        indexer all tokens are expanded, but latents are read of the chosen ones only, for each query anew: 2,048
        queries that choose as many tokens are expanded in sequences of up to 8,700 tokens.
        """
        lens = list(zip(query_lens, seq_lens, strict=True))
        num_pairs = sum(queries * keys for queries, keys in lens)
        expanding = sum(seq_lens) * self.rank * (self.qk_nope_head_dim + self.v_head_dim)
        expanded = expanding + num_pairs * (self.qk_dim + self.v_head_dim)
        absorbed: float = num_pairs * (self.attended_dim + self.rank)
        if self.indexer is not None:
            num_chosen = sum(queries * min(keys, self.indexer.top_k) for queries, keys in lens)
            absorbed = CHOSEN_COST * num_chosen * (self.attended_dim + self.rank)
        return expanded < absorbed


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Factors of queries, which grow with the position (Nakanishi, 2025).

    The factor of position p is ``1 + scale * log(1 + floor((p + offset) / interval))``.

    Attributes:
        of_rotated: they are for layers with positions instead of those without.
    """

    scale: float
    interval: float
    offset: int = 1
    of_rotated: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The differences between layers of one model.

    Attributes:
        window: tokens that a token attends to, itself included; 0 for all.
        chunk: a token attends to those from the last multiple of `chunk` on, itself included; 0 for all.
        rope: key of the layer's rotary embedding in DecoderSpec.ropes; None for layers without positions.
        has_experts: its feed-forward network is a mixture of experts.
        num_kv_heads, head_dim, intermediate_size: of the layer; None for those of DecoderSpec.
        kv_source: index of the layer whose keys and values it attends to; None if it has its own.
        values_are_keys: the projected keys are its values too, before norm and rotation.
        has_indexer: of sparse latent attention; a layer without one attends to the tokens that the last layer with
            one has chosen.
    """

    window: int = 0
    chunk: int = 0
    rope: str | None = FULL
    has_experts: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    kv_source: int | None = None
    values_are_keys: bool = False
    has_indexer: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Embeddings of their own that each layer adds its part of, per token (Gemma 3n, 2025).

    Attributes:
        size: P, numbers per layer.
        vocab_size: of these embeddings; other tokens have those of token 0.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AltUp:
    """Several streams of the residual, of which a layer computes one (Baykal et al., 2023).

    Attributes:
        num_streams: N.
        active: index of the stream that layers compute.
        scales_output: the computed stream is scaled by stored numbers before the layer's inputs are gated by it.
        laurel_rank: numbers of the low-rank addend of attention.
        sparsities: sparsity of each layer's feed-forward network; 0 for a dense one.
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
    sparsities: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureTraits:
    """Properties of a decoder that follow from its architecture alone, whatever its configuration says.

    Attributes:
        attention_sinks: each head has one more key, whose value is 0 (kernels.attention_variant).
        qk_norm_names: of the norms of queries and keys in the checkpoint; with a ``{}``, each head has its own.
        fused_qkv, fused_gate_up: checkpoints store q, k and v as one ``qkv_proj``, gate and up as one
            ``gate_up_proj``.
        mlp_names: of an ungated feed-forward network's layers, up and down; None for a gated one.
        interleaved_rope: the numbers 2 i and 2 i + 1 of a head are a pair; their rows are reordered as they are read.
        norm_kind: of the other norms, ``rms``, or ``layer`` with a bias, or ``layer_without_bias``.
        names: names of the parts in the checkpoint.
        value_norm: values are normalized per head, by an RMSNorm without weights.
        layer_scalars: the residual is multiplied by a stored number after each layer.
    """

    attention_sinks: bool = False
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mlp_names: tuple[str, str] | None = None
    interleaved_rope: bool = False
    norm_kind: str = "rms"
    names: Names = field(default_factory=Names)
    value_norm: bool = False
    layer_scalars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ArchitectureTraits):
    """Sizes and options of a decoder. All sizes are of the whole model, not of a rank's shard.

    Attributes:
        ropes: key |-> rotary embedding.
        attention_scale: multiplies the products of queries and keys.
        attention_soft_cap, logits_soft_cap: ``cap * tanh(x / cap)`` bounds scores and logits; 0 for unbounded.
        qk_norm: norm of queries and keys: RMSNorm before the rotation over each ``head`` or the whole ``projection``,
            or after it over each ``rotated_head``, or ``rotated_unweighted`` in layers with positions only;
            LayerNorm with weights per head, ``layer_norm``; None for no norm.
        norm_offset: added to the weights of all norms.
        parallel_residual: attention and feed-forward network have the same input.
        embedding_scale, residual_scale, logits_scale: multiply the embeddings, what a layer adds to the residual,
            and the logits.
        draft_prefixes: names of tensors of the checkpoint that only draft heads use begin with one of these.
        latent: multi-head latent attention; None for attention to keys and values of heads.
        head_bias: the head has a bias.
        query_temperature: None for none.
        per_layer_inputs: None for none.
        altup: None for a residual of one stream.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: dict[str, Rope]
    attention_scale: float
    activation: str = "silu"
    attention_soft_cap: float = 0.0
    logits_soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    norms: Norms = field(default_factory=Norms)
    norm_offset: float = 0.0
    parallel_residual: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    experts: Experts | None = None
    tied_embeddings: bool = False
    draft_prefixes: tuple[str, ...] = ()
    latent: MlaSpec | None = None
    head_bias: bool = False
    query_temperature: QueryTemperature | None = None
    per_layer_inputs: PerLayerInputs | None = None
    altup: AltUp | None = None

    def of_layer(self, layer: LayerSpec) -> DecoderSpec:
        """Return the spec with the sizes of a layer."""
        return replace(
            self,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            head_dim=layer.head_dim or self.head_dim,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )
