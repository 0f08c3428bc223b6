"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one definition, their differences are in the DecoderSpec."""

from __future__ import annotations

from torch import Tensor

from ...kernels.activation import silu_and_mul
from ...kernels.norm import add_rms_norm, rms_norm
from ...kernels.rotate_and_store import rotate_and_store
from ..attention import AttentionInputs, paged_attention
from ..layers import (
    ColumnParallelLinear,
    LoadContext,
    RotaryTable,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from .spec import DecoderSpec


class Attention:
    """Self-attention over the paged cache; a rank computes its own heads."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.norm_eps = spec.norm_eps
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names = [f"{name}.{projection}_proj" for projection in "qkv"]
        self.qkv = ColumnParallelLinear(
            load, names, spec.hidden_size, [q_size, kv_size, kv_size], bias=spec.qkv_bias
        )
        self.output = RowParallelLinear(
            load, f"{name}.o_proj", q_size, spec.hidden_size, bias=spec.output_bias
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = load.whole(f"{name}.q_norm.weight", spec.head_dim)
            self.k_norm = load.whole(f"{name}.k_norm.weight", spec.head_dim)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """[T, E] -> [T, E]; writes the tokens' keys and values before anything reads them."""
        num_tokens = x.shape[0]
        heads = self.qkv.forward(x).view(num_tokens, -1, self.head_dim)
        q = rotate_and_store(
            heads, kv_cache, inputs.slot_mapping, *rotation, self.q_norm, self.k_norm, self.norm_eps
        )
        attended = paged_attention(q, kv_cache, inputs, self.scale)
        return self.output.forward(attended.view(num_tokens, -1))


class Mlp:
    """SwiGLU feed-forward."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        inner = spec.intermediate_size
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = ColumnParallelLinear(load, names, spec.hidden_size, [inner, inner], bias=spec.mlp_bias)
        self.down = RowParallelLinear(load, f"{name}.down_proj", inner, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down.forward(silu_and_mul(self.gate_up.forward(x)))


class DecoderLayer:
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        self.norm_eps = spec.norm_eps
        self.input_norm = load.whole(f"{name}.input_layernorm.weight", spec.hidden_size)
        self.attention = Attention(load, spec, f"{name}.self_attn")
        self.post_attention_norm = load.whole(f"{name}.post_attention_layernorm.weight", spec.hidden_size)
        self.mlp = Mlp(load, spec, f"{name}.mlp")

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        inputs: AttentionInputs,
    ) -> Tensor:
        """Additions to the residual are made with the norm that follows them, which reads it anyway.

        Args:
            x: what the layer before wants added to `residual`, if there is one.
            residual: [T, E]; updated in place.

        Returns:
            What is to be added to `residual`, [T, E].
        """
        if x is None:
            x = rms_norm(residual, self.input_norm, self.norm_eps)
        else:
            x = add_rms_norm(x, residual, self.input_norm, self.norm_eps)
        x = self.attention.forward(x, rotation, kv_cache, inputs)
        x = add_rms_norm(x, residual, self.post_attention_norm, self.norm_eps)
        return self.mlp.forward(x)


class Decoder:
    """Token ids to hidden states to logits.

    Args:
        num_positions: positions that the rotary table covers.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, num_positions: int) -> None:
        self.norm_eps = spec.norm_eps
        self.rotary = RotaryTable(load, spec.rope, spec.head_dim, num_positions)
        self.embedding = VocabParallelEmbedding(load, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer(load, spec, f"model.layers.{index}") for index in range(spec.num_layers)]
        self.norm = load.whole("model.norm.weight", spec.hidden_size)
        tied = self.embedding if spec.tied_embeddings else None
        self.head = VocabParallelHead(load, "lm_head", spec.hidden_size, spec.vocab_size, tied)
        # Some checkpoints store the head although it is tied.
        load.checkpoint.expect_all_read(ignoring=["lm_head.weight"] if spec.tied_embeddings else [])

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], inputs: AttentionInputs
    ) -> Tensor:
        """Hidden states after the last layer, before the last norm.

        Args:
            token_ids: [T] int32.
            positions: [T] int64.
            kv_caches: a layer each, [N, 2, Hkv, B, D].

        Returns:
            [T, E].
        """
        hidden = self.embedding.forward(token_ids)
        rotation = self.rotary.at(positions)
        x = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer.forward(x, hidden, rotation, kv_cache, inputs)
        return hidden if x is None else hidden.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        return self.head.forward(rms_norm(hidden, self.norm, self.norm_eps))
