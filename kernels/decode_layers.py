"""The layers of a decoder over one token of each sequence, in one call into C++ (native/decode_layers.cpp).

A step of a small model is some 80 ops, and on a CPU calling them one by one from Python takes as long as a third of
computing them. The ops are the same ones in the same order, and so are their results, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_variant import AttentionVariant
from .linear import PackedWeight
from .native import ops as cpu
from .native.library import library
from .native.panels import STORED, Panels, max_linear_tokens
from .quantized_kv import LIMITS, MIN_MAGNITUDE

GATES = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Attention, then a gated feed-forward network: each reads the residual normalised, and is added to it.

    Attributes:
        qkv, gate_up: [(Hq + 2 Hkv) D, E] and [2 I, E], with a bias or None.
        output, down: [E, Hq D] and [E, I].
        before_attention, before_mlp: [E], weights of RMSNorm.
        after_attention, after_mlp: [E], of RMSNorm over what is to be added, or None.
        q_norm, k_norm: [D], of RMSNorm over each head, or both None.
        eps: of the norms.
        residual_scale: multiplies what is added.
        rope: which of a step's rotations turns queries and keys; None: none.
        gate: of GATES.
        head_dim: D.
        scale, variant: of attention, as for kernels.paged_attention; without ALiBi.
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
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

    @property
    def has_native_ops(self) -> bool:
        """Whether there are C++ ops for all of it."""
        weights = self.qkv, self.output, self.gate_up, self.down
        panels = [weight.panels for weight in weights if weight.panels is not None]
        if len(panels) < len(weights) or self.head_dim not in cpu.HEAD_DIMS:
            return False
        lengths = self.head_dim, *(weight.in_features for weight in panels)
        assert self.variant.alibi_slopes is None
        return all(cpu.supports(self.before_attention, length) for length in lengths)


def prefers_native_linear(num_tokens: int) -> bool:
    """Whether so many are few enough that our own linear layers are the fastest."""
    return num_tokens <= max_linear_tokens()


class DecodeLayers:
    """Layers whose steps are calls of one function with the addresses of everything that is the same in each.

    Args:
        layers: all has_native_ops, of one dtype and the same sizes.
        last_norm: [E], of RMSNorm over what comes of them.
    """

    def __init__(self, layers: Sequence[DenseLayer], last_norm: Tensor) -> None:
        assert all(layer.has_native_ops for layer in layers)
        assert ctypes.sizeof(_Layer) == library().quire_decode_layer_bytes()
        self._layers, self._last_norm = layers, last_norm  # keeps the memory
        self._native = (_Layer * len(layers))(*map(_native, layers))
        self._caches: Sequence[tuple[Tensor, Tensor | None]] = ()
        self._dtype = layers[0].before_attention.dtype
        self._scratch_len = max(map(_scratch_len, self._native))

    @property
    def num_sublayers(self) -> int:
        """Those of the layers, and the last norm."""
        return 2 * len(self._layers) + 1

    def bind(self, caches: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Gives each layer its cache and its scales, as for kernels.paged_attention; for the steps from now on."""
        self._caches = caches
        for layer, (blocks, scales) in zip(self._native, caches, strict=True):
            assert blocks.is_contiguous()
            assert blocks.shape[2] == layer.num_kv_heads
            assert blocks.shape[4] == layer.head_dim
            layer.cache, layer.cache_scales = blocks.data_ptr(), cpu.address_of(scales)
            layer.cache_type, layer.block_size = cpu.CACHE_DTYPES[blocks.dtype], blocks.shape[3]
            if scales is None:
                assert blocks.dtype == self._dtype
            else:
                assert scales.is_contiguous()
                layer.cache_limit, layer.cache_min_magnitude = LIMITS[blocks.dtype], MIN_MAGNITUDE

    def run(
        self,
        halves: range,
        x: Tensor,
        residual: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
    ) -> None:
        """Computes consecutive halves of layers: half 2 i is the attention of layer i, 2 i + 1 its feed-forward part.

        Each takes `x`, which the half before has left, normalises and scales it if that is to be done after that
        half, and adds it to the residual; half 0 takes none. It leaves in `x` what it computes itself, and the half
        after those of the layers the residual, normalised.

        Args:
            x, residual: [T, E], written.
            rotations: cosines and sines, each [T, R], as for kernels.rope.
            slot_mapping: [T] int64.
            block_tables: [T, M] int32.
            seq_lens: [T] int32, this step's token included.
        """
        num_tokens = x.shape[0]
        assert self._caches
        assert x.dtype == residual.dtype == self._dtype
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert slot_mapping.dtype == torch.int64
        assert block_tables.dtype == seq_lens.dtype == torch.int32
        turned = (_Rotation * len(rotations))(*[_native_rotation(cos, sin) for cos, sin in rotations])
        scratch = torch.empty(num_tokens * self._scratch_len, dtype=self._dtype)
        library().quire_decode_layers(
            ctypes.addressof(self._native), len(self._layers), self._last_norm.data_ptr(), halves.start, halves.stop,
            cpu.DTYPES[self._dtype], num_tokens, ctypes.addressof(turned), slot_mapping.data_ptr(),
            block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(), x.data_ptr(), residual.data_ptr(),
            scratch.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("stored", "in_features", "out_features", "stride")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in ("before_attention", "before_mlp", "after_attention", "after_mlp")
        ),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "cache", "cache_scales")),
        *((name, ctypes.c_int64) for name in ("cache_type", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "window", "rope", "gate")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "eps", "residual_scale")),
        *((name, ctypes.c_float) for name in ("cache_limit", "cache_min_magnitude")),
    ]


class _Rotation(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("rotated_dim", "stride")),
    ]


def _native(layer: DenseLayer) -> _Layer:
    qkv, output = _native_linear(layer.qkv.panels, layer.qkv_bias), _native_linear(layer.output.panels)
    num_heads = output.in_features // layer.head_dim
    return _Layer(
        qkv=qkv,
        output=output,
        gate_up=_native_linear(layer.gate_up.panels, layer.gate_up_bias),
        down=_native_linear(layer.down.panels),
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
        gate=GATES[layer.gate],
        scale=layer.scale,
        soft_cap=layer.variant.soft_cap,
        eps=layer.eps,
        residual_scale=layer.residual_scale,
    )


def _native_linear(panels: Panels | None, bias: Tensor | None = None) -> _Linear:
    assert panels is not None
    return _Linear(
        panels=panels.address,
        scales=cpu.address_of(panels.scales),
        bias=cpu.address_of(bias),
        stored=STORED[panels.dtype],
        in_features=panels.in_features,
        out_features=panels.out_features,
        stride=panels.stride,
    )


def _native_rotation(cos: Tensor, sin: Tensor) -> _Rotation:
    assert cos.stride() == sin.stride()
    return _Rotation(cos.data_ptr(), sin.data_ptr(), cos.shape[1], cos.stride(0))


def _scratch_len(layer: _Layer) -> int:
    """Numbers a token that half a layer puts down on its way: normalised, and around its first linear layer."""
    attention = layer.qkv.out_features + layer.output.in_features
    feed_forward = layer.gate_up.out_features + layer.down.in_features
    return int(layer.qkv.in_features + max(attention, feed_forward))
