"""CcaAttention: attention to convolved queries and keys; see proto.model.cca."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.attention_variant import AttentionVariant
from ....kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.shared_attention import token_windows
from ....kernels.state_runs import StateRuns
from ....proto.model.cca import CcaSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import StateMixer, read_float32


class CcaAttention(StateMixer):
    """Attention whose heads are convolved; each rank computes its KV heads with all queries of theirs.

    Ranks that share a KV head compute the same keys, which depend on all of its queries, and attend by some of these.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: CcaSpec, name: str) -> None:
        attention, inner = own.attention, f"{name}.qkv_proj"
        self.spec, self.rope, self._eps = own, attention.rope, spec.norm_eps
        self._variant = AttentionVariant(window=attention.window)
        dim, num_kv, share = (
            attention.head_dim,
            attention.num_kv_heads,
            attention.num_heads // attention.num_kv_heads,
        )
        kv, heads = load.head_shard(num_kv, 1), load.head_shard(attention.num_heads, 1)
        self._kv, self._share, self._dim = slice(kv.start, kv.end), share, dim
        self._num_queries = len(kv) * share
        first = heads.start - kv.start * share
        self._queries = slice(first, first + len(heads))
        queries, keys = load.head_shard(num_kv, share * dim), load.head_shard(num_kv, dim)
        half = Shard(0, 1, num_kv * dim // 2)
        projections = [Projection(f"{inner}.q_proj", queries), Projection(f"{inner}.k_proj", keys)]
        projections += [Projection(f"{inner}.v_proj_{own}", half) for own in ("delayed", "current")]
        self.qkv = ColumnParallelLinear(load, projections, spec.hidden_size, bias=False)
        self._num_mixed, self._num_values = len(queries) + len(keys), len(half)
        total = attention.num_heads * dim

        def read(part: str, *shape: int) -> Tensor:
            """Return this rank's channels of a convolution, [C, ...]."""
            whole = load.replicated(f"{inner}.{part}", total + num_kv * dim, *shape)
            own_keys = whole[total + keys.start : total + keys.end]
            return torch.cat((whole[queries.start : queries.end], own_keys)).float()

        by_channel, by_head = own.widths
        self._by_channel = read("conv_qk_depthwise.weight", 1, by_channel)[:, 0]  # [C, K]
        self._channel_bias = read("conv_qk_depthwise.bias")
        # [H, D, D K]: the inputs of a head's numbers, of one token after the other.
        weight = read("conv_qk_grouped.weight", dim, by_head).unflatten(0, (-1, dim))
        self._by_head = weight.transpose(2, 3).flatten(2).contiguous()
        self._head_bias = read("conv_qk_grouped.bias").view(1, -1, dim)
        self._key_factors = read_float32(load, f"{name}.qk_norm.temp", load.head_shard(num_kv, 1))[:, None]
        self.output = RowParallelLinear(load, f"{name}.o_proj", total, spec.hidden_size, bias=False)

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens to the cache, and their projections to the state."""
        assert inputs.states is not None
        heads = self.mix(x, inputs.states.layers[self.layer], inputs.states.runs)
        inputs = inputs.of_group(kv_cache.group)
        cos, sin = rotations[self.rope]
        q = fused_qk_norm_rope_kv_write(
            heads, kv_cache.blocks, inputs.slot_mapping, cos, sin, None, None, self._eps, kv_cache.scales
        )
        attended = paged_attention(q, kv_cache, inputs, self.spec.attention.scale, self._variant)
        return self.output.forward_partial(attended.flatten(1))

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor:
        """Return queries, keys and values, not yet rotated, [T, Hq + 2 Hkv, D]; replace the states."""
        projected = self.qkv.forward(x)
        kept, current = projected[:, : -self._num_values], projected[:, -self._num_values :]
        ends = torch.arange(len(projected), device=projected.device)
        windows = runs.compute(token_windows, kept, ends, states=states[0], by_token=False)
        mixed = self._convolve(windows[..., : self._num_mixed].float())
        q, k = self._split(mixed)
        q_residual, k_residual = self._split(kept[:, : self._num_mixed].float().unflatten(1, (-1, self._dim)))
        q_residual = (q_residual + k_residual.repeat_interleave(self._share, 1)) / 2
        k_residual = q_residual.unflatten(1, (-1, self._share)).mean(dim=2)
        q, k = self._normalize(q + q_residual), self._normalize(k + k_residual) * self._key_factors
        values = torch.cat((current, windows[:, -2, self._num_mixed :]), dim=1).unflatten(1, (-1, self._dim))
        parts = [part.to(projected.dtype) for part in (q[:, self._queries], k)]
        return torch.cat((*parts, values[:, self._kv]), dim=1)

    def _convolve(self, windows: Tensor) -> Tensor:
        """[T, K, C] -> [T, H, D], float32."""
        by_channel, by_head = self.spec.widths
        steps = []
        for start in range(by_head):
            taps = windows[:, start : start + by_channel]
            steps.append((taps * self._by_channel.T).sum(dim=1) + self._channel_bias)
        inputs = torch.stack([step.unflatten(1, (-1, self._dim)) for step in steps], dim=2).flatten(2)
        return torch.einsum("thi,hoi->tho", inputs, self._by_head) + self._head_bias

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of this rank's KV heads, and their keys."""
        return heads[:, : self._num_queries], heads[:, self._num_queries :]

    def _normalize(self, x: Tensor) -> Tensor:
        """Scale heads to the square root of their length."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).eps)
        scaled: Tensor = x / length * float(self._dim**0.5)
        return scaled
