"""DeepGEMM with its recorded signatures: checks names, shapes, strides and dtypes as on Hopper, and multiplies."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from recorded_signatures import Signatures
from torch import Tensor

SIGNATURES = Signatures("deep_gemm")
BLOCK = 128


class FakeDeepGemm(ModuleType):
    """The package.

    Attributes:
        num_calls: products so far.
    """

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.num_calls = 0

    def fp8_gemm_nt(self, *args: Any, **kwargs: Any) -> None:
        given = SIGNATURES.bind("fp8_gemm_nt", *args, **kwargs)
        (a, a_scales), (b, b_scales), d = given["a"], given["b"], given["d"]
        assert all(given[name] is None for name in ("c", "recipe", "recipe_a", "recipe_b"))
        (num_tokens, num_inputs), num_outputs = a.shape, len(b)
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert b.shape == (num_outputs, num_inputs)
        num_groups = -(-num_inputs // BLOCK)
        assert a_scales.dtype == b_scales.dtype == torch.float32
        assert a_scales.shape == (num_tokens, num_groups)
        assert b_scales.shape == (-(-num_outputs // BLOCK), num_groups)
        assert b_scales.is_contiguous()
        assert d.dtype in (torch.bfloat16, torch.float32)
        assert d.shape == (num_tokens, num_outputs)
        assert d.stride() == (num_outputs, 1)
        assert num_outputs * d.itemsize % 16 == 0
        self.num_calls += 1
        tokens = a.double() * _expand(a_scales, 1, num_inputs)
        rows = b_scales.repeat_interleave(BLOCK, dim=0)[:num_outputs]
        d.copy_(tokens @ (b.double() * _expand(rows, 1, num_inputs)).T)


def _expand(scales: Tensor, dim: int, length: int) -> Tensor:
    return scales.double().repeat_interleave(BLOCK, dim=dim)[:, :length]
