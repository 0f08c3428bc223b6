"""SharedAttention: attention to the keys and values of an earlier layer (Gemma 3n, 2025)."""

from __future__ import annotations

from torch import Tensor

from ....kernels.all_reduce_norm import Peers
from ....kernels.attention_variant import AttentionVariant
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.rope import apply_rope
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext


class SharedAttention:
    """Self-attention whose keys and values an earlier layer has written to the cache.

    Checkpoints may have weights for keys and values of such a layer; they have no effect.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str, peers: Peers | None
    ) -> None:
        self.head_dim, self.scale, self.norm_eps = spec.head_dim, spec.attention_scale, spec.norm_eps
        self.rope = layer.rope
        self.variant = AttentionVariant(window=layer.window, soft_cap=spec.attention_soft_cap)
        q_size = spec.num_heads * spec.head_dim
        queries = Projection(f"{name}.q_proj", load.head_shard(spec.num_heads, spec.head_dim))
        self.qkv = ColumnParallelLinear(load, [queries], spec.hidden_size, bias=spec.qkv_bias)
        output = f"{name}.{spec.names.attention_output}"
        self.output = RowParallelLinear(load, output, q_size, spec.hidden_size, spec.output_bias, peers)
        self.q_norm: Tensor | None = None
        if spec.qk_norm == "head":
            self.q_norm = load.norm(f"{name}.{spec.qk_norm_names[0]}", spec.head_dim, spec.norm_offset)
        for unused in ("k_proj", "v_proj", *spec.qk_norm_names[1:]):
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
        q = projected.view(len(projected), -1, self.head_dim)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm, self.norm_eps)
        cos, sin = rotations[self.rope]
        if cos is not None and sin is not None:
            apply_rope(q, cos, sin)
        attended = paged_attention(q, kv_cache, inputs.of_group(kv_cache.group), self.scale, self.variant)
        return self.output.forward_partial(attended.view(len(q), -1))
