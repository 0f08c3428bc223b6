"""PackedQuantized: weights of 4 or 8 bits per number that C++ ops dequantize a panel at a time, in the cache.

The product is that of the dequantized weight, bit for bit; only memory and the bytes that a step reads are fewer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Layout, PackedWeight
from .native import packed_quantized as native
from .native.library import dtype_codes, is_available, library
from .native.memory import copy_to_huge_pages
from .native.ops import address_of
from .native.packed_weights import PackedMatrix, panel_len
from .quantized_linear import FLOAT4, FLOAT8, QuantizedWeight, unpack_nibbles

# Dtype of codes |-> inputs per word of 32 bits.
_WORD_INPUTS = {FLOAT8: 4, FLOAT4: 8, torch.uint8: 8}
# The number of each of eight 4-bit inputs that a word has from its lowest bits on.
_NIBBLE_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
# Exponents of float32 that scales may have as powers of two: the product with a float4 number has an exponent, too.
_MIN_EXPONENT, _MAX_EXPONENT = 4, 250


@dataclass(frozen=True, slots=True)
class PackedQuantized:
    """The weight [N, K] of a linear layer as ``(codes - zeros) * scales`` (native/packed_quantized.h).

    Attributes:
        words: [P, K / W, panel_len()] int32, of P panels; W inputs per word.
        scales: [P, G, panel_len()] float32; or uint8, powers of two as the exponents of float32.
        zeros: in the same shape, int8; None if all are `zero`.
        dtype: of the codes, as in QuantizedWeight.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: float
    dtype: torch.dtype
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.words.nbytes + self.scales.nbytes + zeros

    def native(self) -> native.PackedQuantized:
        """Return the weight for C++; this object keeps the memory alive."""
        native.check_layout()
        codes = dtype_codes()
        return native.PackedQuantized(
            words=self.words.data_ptr(),
            scales=self.scales.data_ptr(),
            zeros=address_of(self.zeros),
            dtype=codes[self.dtype],
            scale_dtype=codes[self.scales.dtype],
            group_len=self.in_features // self.scales.shape[1],
            in_features=self.in_features,
            out_features=self.out_features,
            zero=self.zero,
        )


def pack_quantized(weight: QuantizedWeight) -> PackedQuantized | None:
    """Pack a weight for a CPU. Returns None if the ops do not support it.

    They support 4-bit and float8 numbers whose groups are runs of inputs that begin with a word.
    """
    per_word = _WORD_INPUTS.get(weight.codes.dtype)
    num_groups = weight.scales.shape[0]
    if per_word is None or weight.group_index is not None or not (weight.codes.is_cpu and is_available()):
        return None
    if weight.in_features % (num_groups * per_word) or not _are_int8(weight.zeros):
        return None
    words = copy_to_huge_pages(_in_panels(_words(weight.codes).t()))
    zeros, zero = _split_zeros(weight.zeros)
    return PackedQuantized(
        words,
        _in_panels(_exponents(weight.scales.float())),
        None if zeros is None else _in_panels(zeros),
        zero,
        weight.codes.dtype,
        weight.in_features,
        weight.out_features,
    )


def dequantize_packed(weight: PackedQuantized, dtype: torch.dtype) -> PackedWeight:
    """Return the weight in a dtype of tokens, rounded to nearest."""
    out, own = torch.empty(len(weight.words), weight.in_features, panel_len(), dtype=dtype), weight.native()
    library().quire_dequantize(
        ctypes.addressof(own), dtype_codes()[dtype], out.data_ptr(), torch.get_num_threads()
    )
    stride = weight.in_features * panel_len()
    matrix = PackedMatrix(out.data_ptr(), stride, weight.in_features, weight.out_features, dtype)
    return PackedWeight(out, Layout.PACKED, matrix)


def _words(codes: Tensor) -> Tensor:
    """[N, K] codes, of 4 bits packed -> [N, K / W] int32."""
    if codes.dtype == FLOAT8:
        return codes.contiguous().view(torch.int32)
    nibbles = unpack_nibbles(codes.view(torch.uint8)).unflatten(1, (-1, 8))[:, :, _NIBBLE_ORDER]
    packed = nibbles[:, :, ::2] | nibbles[:, :, 1::2] << 4
    words: Tensor = packed.contiguous().view(torch.int32).squeeze(-1)
    return words


def _in_panels(numbers: Tensor) -> Tensor:
    """[A, N] -> [N / panel_len(), A, panel_len()], padded with zeros."""
    num_missing = -numbers.shape[1] % panel_len()
    padded: Tensor = F.pad(numbers, (0, num_missing))
    return padded.view(len(numbers), -1, panel_len()).transpose(0, 1).contiguous()


def _exponents(scales: Tensor) -> Tensor:
    """Return powers of two as the exponents of float32, [G, N] uint8, and other scales unchanged."""
    bits = scales.contiguous().view(torch.int32)
    exponents = bits >> 23
    is_power = (bits & 0x7FFFFF == 0) & (exponents >= _MIN_EXPONENT) & (exponents <= _MAX_EXPONENT)
    return exponents.to(torch.uint8) if bool(is_power.all()) else scales


def _are_int8(zeros: Tensor | None) -> bool:
    return zeros is None or bool((zeros.abs() <= 127).all())


def _split_zeros(zeros: Tensor | None) -> tuple[Tensor | None, float]:
    """Return the zeros as int8 and 0; or None and the number that all of them are."""
    if zeros is None:
        return None, 0.0
    first = int(zeros[0, 0])
    return (None, float(first)) if bool((zeros == first).all()) else (zeros.to(torch.int8), 0.0)
