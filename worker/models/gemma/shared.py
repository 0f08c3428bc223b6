"""Parts of Gemma 3n and 4: attention with normalized or shared values, and per-layer embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....kernels.activation import UNGATED_ACTIVATIONS
from ....kernels.attention_variant import AttentionVariant
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.rope import apply_rope
from ....proto.model.attention import AttentionSpec
from ....proto.model.families.gemma import PerLayerInputs
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...weights.linear_weight import LinearWeight
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..llama.decoder_layer import DecoderLayer, Mixer
from ..load_context import LoadContext
from ..mixers.attention import Attention
from ..vocab_parallel import VocabParallelEmbedding


class GemmaLayer(DecoderLayer):
    """A layer whose values are normalized, or which attends to the keys and values of an earlier one."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        self.index = int(name.rpartition(".")[2])
        super().__init__(load, spec, layer, name)

    def make_mixer(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> Mixer:
        own = layer.mixer
        assert isinstance(own, AttentionSpec)
        if layer.kv_source is not None:
            return SharedAttention(load, spec, own, name)
        attention = Attention(load, spec, own, name)
        attention.steps.append(ValueNorm(load, own, spec.norm_eps))
        return attention

    def to_dense_layer(self, ropes: Sequence[str]) -> None:
        """Return None: a DenseLayer cannot represent the layer."""


class ValueNorm:
    """RMSNorm of each head of values, without weights; a HeadStep."""

    def __init__(self, load: LoadContext, own: AttentionSpec, eps: float) -> None:
        self._ones, self._eps = load.empty(own.head_dim).fill_(1), eps
        self._num_kv_heads = len(load.head_shard(own.num_kv_heads, 1))

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        values = heads[:, -self._num_kv_heads :]
        values.copy_(rms_norm(values, self._ones, self._eps))


class SharedAttention:
    """Self-attention whose keys and values an earlier layer has written to the cache.

    Checkpoints may have weights for keys and values of such a layer; they have no effect.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> None:
        self._spec, self.rope, self._eps = own, own.rope, spec.norm_eps
        self._variant = AttentionVariant(window=own.window, soft_cap=own.soft_cap)
        queries = Projection(f"{name}.q_proj", load.head_shard(own.num_heads, own.head_dim))
        self.qkv = ColumnParallelLinear(load, [queries], spec.hidden_size, bias=own.qkv_bias)
        self.output = RowParallelLinear(
            load, f"{name}.o_proj", own.num_heads * own.head_dim, spec.hidden_size, own.output_bias
        )
        self._q_norm = load.norm(f"{name}.q_norm", own.head_dim, spec.norms.offset)
        for unused in ("k_proj", "v_proj", "k_norm"):
            for suffix in ("weight", "bias"):
                load.checkpoint.ignore(f"{name}.{unused}.{suffix}")

    def forward(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E].

        Args:
            kv_cache: of the layer that has written the keys and values.
        """
        projected = self.qkv.forward(x)
        q = rms_norm(projected.view(len(projected), -1, self._spec.head_dim), self._q_norm, self._eps)
        cos, sin = rotations[self.rope]
        if cos is not None and sin is not None:
            apply_rope(q, cos, sin)
        attended = paged_attention(
            q, kv_cache, inputs.of_group(kv_cache.group), self._spec.scale, self._variant
        )
        return self.output.forward_partial(attended.view(len(q), -1))


class PerLayerEmbedding:
    """The inputs of all layers, from the tokens and from their embeddings.

    The embeddings of tokens, most of the model's weights, are sharded over the ranks.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, inputs: PerLayerInputs) -> None:
        self._vocab_size, self._eps = inputs.vocab_size, spec.norm_eps
        self._shape = len(spec.layers), inputs.size
        width = len(spec.layers) * inputs.size
        self._tokens = VocabParallelEmbedding(
            load, "model.embed_tokens_per_layer", inputs.vocab_size, width, inputs.size**0.5
        )
        self._projection = whole_linear(load, "model.per_layer_model_projection", width, spec.hidden_size)
        self._scale = spec.hidden_size**-0.5
        self._norm = load.norm("model.per_layer_projection_norm", inputs.size, spec.norms.offset)

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[T] and [T, E] -> [T, L, P]."""
        known = token_ids.where(token_ids < self._vocab_size, 0)
        of_tokens = self._tokens.forward(known).unflatten(1, self._shape)
        projected = self._projection.multiply(embedded).mul_(self._scale).unflatten(1, self._shape)
        return rms_norm(projected, self._norm, self._eps).add_(of_tokens).mul_(2**-0.5)


class InputGate:
    """Addend of a layer's output: its part of the inputs, gated by the output."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, inputs: PerLayerInputs, name: str) -> None:
        self._gate = whole_linear(load, f"{name}.per_layer_input_gate", inputs.size, spec.hidden_size)
        self._projection = whole_linear(load, f"{name}.per_layer_projection", spec.hidden_size, inputs.size)
        self._norm = load.norm(f"{name}.post_per_layer_input_norm", spec.hidden_size, spec.norms.offset)
        self._activation = UNGATED_ACTIVATIONS[spec.activation]
        self._eps = spec.norm_eps

    def forward(self, hidden: Tensor, layer_inputs: Tensor) -> Tensor:
        """[T, E] and [T, P] -> [T, E]."""
        gated = self._activation(self._gate.multiply(hidden)) * layer_inputs
        return rms_norm(self._projection.multiply(gated), self._norm, self._eps)


def whole_linear(load: LoadContext, name: str, out_features: int, in_features: int) -> LinearWeight:
    """Read the matrix of a small layer that every rank computes in full."""
    return load.linear([WeightSlice(name, (out_features, in_features), 0, 0, out_features)])
