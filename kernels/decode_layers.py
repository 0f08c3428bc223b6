"""The layers of a decoder over one token per sequence, in one call into C++ (native/decode_layers.cpp).

A step of a small model takes some 80 ops, and calling them one by one from Python takes a third as long as computing
them on a CPU. The ops and their order are the same, and so are the results, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_variant import AttentionVariant
from .linear import PackedWeight
from .lora import LoraFactors, LoraGroups
from .native import decode_layers as native
from .native import lora as native_lora
from .native import ops as cpu
from .native.library import dtype_codes, gate_codes, head_dims, library
from .native.packed_weights import PackedMatrix
from .quantized_kv import LIMITS, MIN_MAGNITUDE


class LayerAdapters(NamedTuple):
    """The adapters of a layer's linear layers; None for one that adapters may not change."""

    qkv: LoraFactors | None
    output: LoraFactors | None
    gate_up: LoraFactors | None
    down: LoraFactors | None


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Weights and settings of a layer: attention, then a gated feed-forward network, each with a residual connection.

    Attributes:
        qkv, gate_up: [(Hq + 2 Hkv) D, E] and [2 I, E], with a bias or None.
        output, down: [E, Hq D] and [E, I].
            `gate_up` and `down` are None if the caller computes the feed-forward network.
        before_attention, before_mlp: [E], weights of the RMSNorm over a sublayer's input.
        after_attention, after_mlp: [E], weights of the RMSNorm over a sublayer's output, or None.
        q_norm, k_norm: [D], weights of the RMSNorm over each head, or both None.
        eps: of the norms.
        residual_scale: multiplies a sublayer's output before it is added to the residual.
        rope: index into the `rotations` of DecodeLayers.run; None: no rotary embedding.
        gate: activation of the feed-forward network, "silu" or "gelu_tanh".
        head_dim: D.
        scale, variant: of attention, as for kernels.paged_attention; without ALiBi.
        adapters: None without adapters.
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight | None
    down: PackedWeight | None
    qkv_bias: Tensor | None
    gate_up_bias: Tensor | None
    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None
    after_mlp: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    residual_scale: float
    rope: int | None
    gate: str
    head_dim: int
    scale: float
    variant: AttentionVariant
    adapters: LayerAdapters | None = None

    @property
    def has_feed_forward(self) -> bool:
        """Return whether the C++ ops compute the feed-forward network."""
        return self.gate_up is not None

    def missing_op(self) -> str | None:
        """Return why the C++ ops cannot compute their part of the layer. Returns None if they can."""
        own = self.qkv, self.output, self.gate_up, self.down
        weights = [weight for weight in own if weight is not None]
        matrix = [weight.matrix for weight in weights if weight.matrix is not None]
        if len(matrix) < len(weights):
            return f"a weight of {self.qkv.weight.dtype} is not packed"
        if self.head_dim not in head_dims():
            return f"there is no attention kernel for a head_dim of {self.head_dim}"
        assert self.variant.alibi_slopes is None
        for length in (self.head_dim, *(weight.in_features for weight in matrix)):
            if not cpu.supports(self.before_attention, length):
                return f"rows of {length} numbers of {self.before_attention.dtype} are not whole vectors"
        return None


class DecodeLayers:
    """Decoder layers that run in one C++ call, which gets the addresses of all weights and caches from a table.

    Args:
        layers: without a missing_op; of one dtype and the same sizes.
        last_norm: [E], weights of the RMSNorm after the last layer.
    """

    def __init__(self, layers: Sequence[DenseLayer], last_norm: Tensor) -> None:
        assert all(layer.missing_op() is None for layer in layers)
        native.check_layout()
        native_lora.check_layout()
        self._layers, self._last_norm = layers, last_norm  # keep the memory alive
        self._native = (native.Layer * len(layers))(*map(native_layer, layers))
        self._factors = bind_adapters(self._native, [layer.adapters for layer in layers])
        self._groups: native_lora.Groups | None = None
        self._caches: Sequence[tuple[Tensor, Tensor | None]] = ()
        self._dtype = layers[0].before_attention.dtype
        self._scratch_len = max(map(_scratch_len, self._native))
        self._aux_columns: dict[frozenset[int], ctypes.Array[ctypes.c_int64]] = {}

    @property
    def num_sublayers(self) -> int:
        """Two for each layer, and one for the last norm."""
        return 2 * len(self._layers) + 1

    def bind(self, caches: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Set each layer's KV cache and scales for the following steps, as for kernels.paged_attention."""
        self._caches = caches
        bind_caches(self._native, caches, self._dtype)

    def set_groups(self, groups: LoraGroups | None) -> None:
        """Set the tokens of the following calls of `run` that have adapters; None for none."""
        self._groups = None if groups is None else groups.native()

    def run(
        self,
        sublayers: range,
        x: Tensor,
        residual: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        aux: Tensor | None = None,
        aux_layers: frozenset[int] = frozenset(),
    ) -> None:
        """Compute consecutive sublayers: 2 i is the attention of layer i, 2 i + 1 its feed-forward network.

        A sublayer reads the previous sublayer's output from `x`, applies the norm and the scale that follow that
        sublayer, adds the result to the residual, and writes its own output to `x`. Sublayer 0 does not read `x`.
        The last sublayer is the last norm, which writes the normalized residual to `x`. Feed-forward networks that
        the caller computes are not among the sublayers of a call.

        Args:
            x, residual: [T, E], written.
            rotations: cosines and sines, each [T, R], as for kernels.rope.
            slot_mapping: [T] int64.
            block_tables: [T, M] int32.
            seq_lens: [T] int32, this step's token included.
            aux: [T, A E], gets the inputs of the A layers `aux_layers` side by side; the number of layers stands for
                the output of the last one.
        """
        num_tokens = x.shape[0]
        assert self._caches
        assert x.dtype == residual.dtype == self._dtype
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert slot_mapping.dtype == torch.int64
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        native_rotations = (native.Rotation * len(rotations))(
            *[_native_rotation(*each) for each in rotations]
        )
        columns = None if aux is None else ctypes.addressof(self._columns_of(aux_layers))
        aux_stride = 0 if aux is None else aux.stride(0)
        scratch = torch.empty(num_tokens * self._scratch_len, dtype=self._dtype)
        library().quire_decode_layers(
            ctypes.addressof(self._native), len(self._layers), self._last_norm.data_ptr(), sublayers.start,
            sublayers.stop, dtype_codes()[self._dtype], num_tokens, ctypes.addressof(native_rotations),
            slot_mapping.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(),
            x.data_ptr(), residual.data_ptr(), cpu.address_of(aux), columns, aux_stride, scratch.data_ptr(),
            torch.get_num_threads(), None if self._groups is None else ctypes.addressof(self._groups),
        )  # fmt: skip

    def _columns_of(self, aux_layers: frozenset[int]) -> ctypes.Array[ctypes.c_int64]:
        """Return the column of each layer's input in `aux`; -1 for layers that have none."""
        columns = self._aux_columns.get(aux_layers)
        if columns is None:
            places = {layer: place for place, layer in enumerate(sorted(aux_layers))}
            length = len(self._last_norm)
            columns = (ctypes.c_int64 * (len(self._layers) + 1))(
                *(places[layer] * length if layer in places else -1 for layer in range(len(self._layers) + 1))
            )
            self._aux_columns[aux_layers] = columns
        return columns


def bind_caches(
    layers: Iterable[native.Layer], caches: Sequence[tuple[Tensor, Tensor | None]], dtype: torch.dtype
) -> None:
    """Write the KV cache and the scales of each layer to its struct."""
    for layer, (blocks, scales) in zip(layers, caches, strict=True):
        assert blocks.is_contiguous()
        assert blocks.shape[2] == layer.num_kv_heads
        assert blocks.shape[4] == layer.head_dim
        layer.cache, layer.cache_scales = blocks.data_ptr(), cpu.address_of(scales)
        layer.cache_dtype, layer.block_size = dtype_codes()[blocks.dtype], blocks.shape[3]
        if scales is None:
            assert blocks.dtype == dtype
        else:
            assert scales.is_contiguous()
            layer.cache_limit, layer.cache_min_magnitude = LIMITS[blocks.dtype], MIN_MAGNITUDE


def bind_adapters(
    layers: Iterable[native.Layer], adapters: Sequence[LayerAdapters | None]
) -> list[native_lora.Factors]:
    """Write the addresses of the adapters to each layer's struct; return what is at them, for the caller to keep."""
    kept = []
    for layer, own in zip(layers, adapters, strict=True):
        if own is not None:
            for name, factors in own._asdict().items():
                if factors is None:
                    continue
                kept.append(factors.native())
                getattr(layer, name).lora = ctypes.addressof(kept[-1])
    return kept


def native_layer(layer: DenseLayer) -> native.Layer:
    """Return the struct of a layer, without its KV cache and its adapters."""
    qkv, output = native_linear(layer.qkv.matrix, layer.qkv_bias), native_linear(layer.output.matrix)
    num_heads = output.in_features // layer.head_dim
    return native.Layer(
        qkv=qkv,
        output=output,
        gate_up=_optional_linear(layer.gate_up, layer.gate_up_bias),
        down=_optional_linear(layer.down),
        before_attention=layer.before_attention.data_ptr(),
        before_mlp=layer.before_mlp.data_ptr(),
        after_attention=cpu.address_of(layer.after_attention),
        after_mlp=cpu.address_of(layer.after_mlp),
        q_norm=cpu.address_of(layer.q_norm),
        k_norm=cpu.address_of(layer.k_norm),
        num_heads=num_heads,
        num_kv_heads=(qkv.out_features // layer.head_dim - num_heads) // 2,
        head_dim=layer.head_dim,
        window=layer.variant.window,
        rope=-1 if layer.rope is None else layer.rope,
        gate=gate_codes()[layer.gate],
        scale=layer.scale,
        soft_cap=layer.variant.soft_cap,
        eps=layer.eps,
        residual_scale=layer.residual_scale,
    )


def _optional_linear(weight: PackedWeight | None, bias: Tensor | None = None) -> native.Linear:
    return native.Linear() if weight is None else native_linear(weight.matrix, bias)


def native_linear(matrix: PackedMatrix | None, bias: Tensor | None = None) -> native.Linear:
    """Return the struct of a weight; the owner of the weight keeps its memory alive."""
    assert matrix is not None
    return native.Linear(
        matrix=matrix.address,
        scales=cpu.address_of(matrix.scales),
        bias=cpu.address_of(bias),
        dtype=dtype_codes()[matrix.dtype],
        in_features=matrix.in_features,
        out_features=matrix.out_features,
        stride=matrix.stride,
    )


def _native_rotation(cos: Tensor, sin: Tensor) -> native.Rotation:
    assert cos.stride() == sin.stride()
    return native.Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[1], cos.stride(0))


def _scratch_len(layer: native.Layer) -> int:
    """Return the numbers per token that a sublayer stores: its normalized input, and two intermediate results."""
    attention = layer.qkv.out_features + layer.output.in_features
    feed_forward = layer.gate_up.out_features + layer.down.in_features
    return int(layer.qkv.in_features + max(attention, feed_forward))
