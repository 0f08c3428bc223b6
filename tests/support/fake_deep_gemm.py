"""DeepGEMM with its recorded signatures: checks names, shapes, strides and dtypes as on Hopper, and multiplies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recorded_signatures import Signatures
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.proto.config import EngineConfig
from quire.worker.libraries.deep_gemm import DeepGemm, DeepGemmExperts
from quire.worker.libraries.installed import Library

SIGNATURES = Signatures("deep_gemm")
BLOCK = 128
# Rows of a tile of grouped products on Hopper.
ALIGNMENT = 128


class FakeDeepGemm(ModuleType):
    """The package.

    Attributes:
        num_calls: products so far.
    """

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.num_calls = 0

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        SIGNATURES.bind("get_mk_alignment_for_contiguous_layout")
        return ALIGNMENT

    def m_grouped_fp8_gemm_nt_contiguous(self, *args: Any, **kwargs: Any) -> None:
        """Multiply each block of ALIGNMENT rows by the weight of its first row's expert; skip it if that is -1."""
        given = SIGNATURES.bind("m_grouped_fp8_gemm_nt_contiguous", *args, **kwargs)
        (a, a_scales), (b, b_scales), d = given["a"], given["b"], given["d"]
        layout = given["grouped_layout"]
        assert all(given[name] is None for name in ("recipe", "recipe_a", "recipe_b"))
        assert not given["use_psum_layout"]
        assert given["expected_m_for_psum_layout"] is None
        (num_rows, num_inputs), (num_experts, num_outputs, _) = a.shape, b.shape
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert b.shape[2] == num_inputs
        assert layout.dtype == torch.int32
        assert layout.shape == (num_rows,)
        assert layout.is_contiguous()
        assert num_rows % ALIGNMENT == 0
        assert a_scales.dtype == b_scales.dtype == torch.float32
        assert a_scales.shape == (num_rows, num_inputs // BLOCK)
        assert b_scales.shape == (num_experts, -(-num_outputs // BLOCK), num_inputs // BLOCK)
        assert b_scales.is_contiguous()
        assert d.dtype == torch.bfloat16
        assert d.shape == (num_rows, num_outputs)
        assert d.stride() == (num_outputs, 1)
        self.num_calls += 1
        d.fill_(torch.nan)
        for first in range(0, num_rows, ALIGNMENT):
            rows, expert = slice(first, first + ALIGNMENT), int(layout[first])
            own = layout[rows]
            assert ((own == expert) | (own == -1)).all(), "rows of two experts share a block"
            if expert < 0:
                continue
            tokens = a[rows].double() * _expand(a_scales[rows], 1, num_inputs)
            of_rows = b_scales[expert].repeat_interleave(BLOCK, dim=0)[:num_outputs]
            d[rows] = (tokens @ (b[expert].double() * _expand(of_rows, 1, num_inputs)).T).to(d.dtype)

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


def install(
    patch: pytest.MonkeyPatch, backend: type[DeepGemm | DeepGemmExperts], config: EngineConfig
) -> EngineConfig:
    """Let a backend find the package on a Hopper GPU, and return the configuration with a checkpoint for it.

    The checkpoint is in float8 with blocks, as published for DeepSeek-V3.
    """
    hf = dict(describe_model(Path(config.model.path), config.model.name).hf)
    hf["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    patch.setattr(Library, "version", "2.6.1")
    patch.setattr(backend, "load", classmethod(lambda cls, device: cls(FakeDeepGemm())))
    return replace(config, model=replace(config.model, hf=hf))
