"""Random quantized weights of each format."""

from __future__ import annotations

import torch

from quire.kernels import quantized_linear as references
from quire.kernels.quantized_linear import FLOAT4, FLOAT8, QuantizedWeight


def random_weight(kind: str, out_features: int, in_features: int) -> QuantizedWeight:
    """Return a random weight: int8 and fp8 with one scale per output, others with groups of 24 or 32 inputs.

    fp4 has powers of two as scales, as in MXFP4.
    """
    if kind in ("int8", "fp8"):
        dtype = torch.int8 if kind == "int8" else FLOAT8
        return references.quantize(torch.randn(out_features, in_features) / in_features**0.5, dtype)
    group_len = 24 if kind == "int4-groups-of-24" else 32
    num_groups = in_features // group_len
    scales = (torch.rand(num_groups, out_features) + 0.5) / (8 * in_features**0.5)
    if kind == "int8-groups":
        codes = torch.randint(-128, 128, (out_features, in_features)).to(torch.int8)
        return QuantizedWeight(codes, scales / 16)
    codes = references.pack_nibbles(torch.randint(0, 16, (out_features, in_features)))
    if kind == "fp4":
        return QuantizedWeight(codes.view(FLOAT4), scales.log2().floor().exp2().bfloat16())
    zeros = torch.randint(0, 17, (num_groups, out_features)).to(torch.int16)
    index = None
    if kind == "int4-any-order":
        index = torch.randint(0, num_groups, (in_features,), dtype=torch.int32)
    return QuantizedWeight(codes, scales.half(), zeros, index)
