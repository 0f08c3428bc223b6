"""DecoderSpec: the differences between decoder architectures.

A layer consists of a mixer, which reads other tokens, and a feed-forward network. Each kind of mixer has a spec and a
file of its own here, and a class and a file of its own in worker/models/mixers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .attention import AttentionSpec
from .compressed import SharedKvSpec
from .experts import Experts
from .mla import MlaSpec
from .rope import Rope
from .state import KeepsState


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of a decoder, and the checkpoint names of those of a layer; None if the layer has no such norm.

    Attributes:
        kind: ``rms``, or ``layer`` with a bias, or ``layer_without_bias``.
        gated: fields above whose norms have a gate: the sigmoid of a network of `gate_rank` inner numbers, which
            reads the normalized numbers, multiplies them.
        offset: added to the weights of all norms, also of queries and keys, which are RMSNorms.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    kind: str = "rms"
    offset: float = 0.0
    gated: tuple[str, ...] = ()
    gate_rank: int = 0


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names of a decoder's parts; those of attention and feed-forward network are within a layer.

    Attributes:
        renames: patterns in the names of tensors, and what replaces them, in this order, before they are read.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    attention_output: str = "o_proj"
    mlp: str = "mlp"
    last_norm: str = "model.norm"
    renames: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward network.

    Attributes:
        names: of the layers of an ungated one, up and down; None for a gated one.
        fused_gate_up: checkpoints store gate and up as one ``gate_up_proj``.
        gated_names: of the layers of a gated one: gate, up and down.
        multipliers: of the gates before the activation, and of the result.
        limit: of the activated gates, and of the other halves; 0 for none.
        clamp: as Experts.clamp.
    """

    intermediate_size: int
    bias: bool = False
    names: tuple[str, str] | None = None
    fused_gate_up: bool = False
    gated_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    multipliers: tuple[float, float] = (1.0, 1.0)
    limit: float = 0.0
    clamp: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class ResidualFactors:
    """Factors of a layer whose parts are added to their normalized inputs, not to the residual (MiniMax-01, 2025).

    Attributes:
        input, mixer: of the mixer's input and its result.
        mlp_input, mlp: of the feed-forward network's.
    """

    input: float
    mixer: float
    mlp_input: float
    mlp: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer of a decoder.

    Attributes:
        mixer: None for a layer that is a feed-forward network only.
        mlp: a mixture of experts instead of one network in layers with `has_experts`; None for a mixer only.
        kv_source: index of the layer whose keys and values it attends to; None if it has its own.
        mixer_name: of the mixer in the checkpoint, if it is not Names.attention.
        norms: of the layer, if they are not those of the decoder.
        expert_limits: Experts.limits of the layer.
        residual_factors: None for a residual that is not normalized.
    """

    mixer: AttentionSpec | MlaSpec | SharedKvSpec | KeepsState | None
    mlp: MlpSpec | None
    has_experts: bool = False
    kv_source: int | None = None
    mixer_name: str | None = None
    norms: Norms | None = None
    expert_limits: tuple[float, float] = (0.0, 0.0)
    residual_factors: ResidualFactors | None = None

    @property
    def has_own_kv(self) -> bool:
        """True if the layer has keys and values, or latents, of its own."""
        return self.kv_source is None and attention_of(self.mixer) is not None

    @property
    def num_cached(self) -> int:
        """Number of the cache's layers that this layer writes."""
        attention = attention_of(self.mixer)
        has_indexer = isinstance(attention, AttentionSpec) and attention.indexer is not None
        return (2 if has_indexer else 1) if self.has_own_kv else 0


def attention_of(mixer: object) -> AttentionSpec | MlaSpec | SharedKvSpec | None:
    """Return the attention of a mixer, or the attention beside its recurrence; None if it has none."""
    if isinstance(mixer, AttentionSpec | MlaSpec | SharedKvSpec):
        return mixer
    beside = getattr(mixer, "attention", None)
    return beside if isinstance(beside, AttentionSpec) else None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and options of a decoder; sizes are those of the whole model, not of a rank's shard.

    Attributes:
        intermediate_size: of a feed-forward network, unless a layer has another one.
        ropes: key |-> rotary embedding.
        experts: of the layers that have some; None without such layers.
        parallel_residual: attention and feed-forward network have the same input.
        embedding_scale, residual_scale, logits_scale: multiply the embeddings, what a layer adds to the residual,
            and the logits.
        normalizes_embeddings: embeddings of tokens have an RMSNorm without weights.
        logits_soft_cap: ``logits_soft_cap * tanh(x / logits_soft_cap)`` bounds the logits; 0 for unbounded.
        draft_prefixes: names of tensors of the checkpoint that only draft heads use begin with one of these.
        names: of the parts in the checkpoint.
        head_bias: the head has a bias.
        variant: spec of the parts that only one family has, whose decoder is a class of its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: dict[str, Rope]
    activation: str = "silu"
    experts: Experts | None = None
    norms: Norms = field(default_factory=Norms)
    parallel_residual: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    normalizes_embeddings: bool = False
    logits_soft_cap: float = 0.0
    tied_embeddings: bool = False
    head_bias: bool = False
    draft_prefixes: tuple[str, ...] = ()
    names: Names = field(default_factory=Names)
    variant: object = None
