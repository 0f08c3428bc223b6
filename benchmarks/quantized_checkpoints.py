"""Quantize a full-precision checkpoint, rounding to nearest.

There is no calibration: scales come from the weights alone, where GPTQ and AWQ also use activations. The files have
the layout of those tools; a calibrated checkpoint usually loses less accuracy.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
MODELOPT_BLOCK = (128, 128)
# The projections of a decoder layer, which all of these tools quantize.
LINEAR = re.compile(
    r"\.(?:[a-z]+(?:_[ab])?_proj(?:_with_mqa)?|w[123]|w[qo]_[ab]|wkv|wgate|indexer\.wk)\.weight$"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Quantization scheme.

    Attributes:
        layout: key of WRITERS.
        bits: of an integer code.
        group_len: inputs that share a scale; None for one scale per output.
        symmetric: the zero point is in the middle of the range.
        act_order: groups consist of inputs with similar weight norm, in any position (gptq and packed).
        is_float: codes are float8 instead of integers.
        block: (outputs, inputs) that share a scale; float8 only. Of modelopt: MODELOPT_BLOCK, or more than any
            weight has, for one scale.
        ignored: regular expression of the layers that stay in full precision.
        has_powers_of_two: scales of float8 blocks are powers of two, stored as e8m0.
        experts: scheme of the routed experts; None for that of all layers.
    """

    layout: str
    bits: int = 4
    group_len: int | None = 32
    symmetric: bool = False
    act_order: bool = False
    is_float: bool = False
    block: tuple[int, int] | None = None
    ignored: str | None = None
    has_powers_of_two: bool = False
    experts: Scheme | None = None

    def of_layer(self, name: str) -> Scheme:
        """Return the scheme of a layer."""
        return self if self.experts is None or ".experts." not in name else self.experts


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight [N, K] as (codes - zeros) * scales.

    Attributes:
        codes: [N, K] int64 from 0, or float8, or numbers of float4 in float64.
        scales: [N, G] in the stored dtype.
        zeros: [N, G] int64, in units of codes.
        groups: [K] int64, the group of each input.
        stored_scales: name |-> tensor, if the layout stores the scales in parts.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    stored_scales: dict[str, Tensor] = field(default_factory=dict)

    def dequantized(self) -> Tensor:
        """Return the weight [N, K] in float64."""
        return (self.codes.double() - self.zeros[:, self.groups]) * self.scales.double()[:, self.groups]


def write_checkpoint(source: Path, out: Path, scheme: Scheme) -> dict[str, Tensor]:
    """Write the quantized model and return its dequantized weights, name in the source |-> weight."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    written: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            ignored = scheme.ignored is not None and re.search(scheme.ignored, name)
            if not LINEAR.search(name) or ignored:
                written[name] = weight
                continue
            layer = name.removesuffix(".weight")
            own = scheme.of_layer(name)
            rounded = _round(weight.double(), own)
            dequantized[name] = rounded.dequantized()
            tensors = WRITERS[own.layout].tensors(rounded, own)
            written |= {f"{layer}.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = WRITERS[scheme.layout].config(scheme)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return dequantized


def _round(weight: Tensor, scheme: Scheme) -> Rounded:
    if scheme.layout in ("nvfp4", "mxfp4") or (scheme.layout == "modelopt" and scheme.group_len):
        return _round_to_float4(weight, scheme)
    if scheme.is_float:
        return _round_to_float8(weight, scheme)
    num_outputs, num_inputs = weight.shape
    groups = torch.arange(num_inputs) // (scheme.group_len or num_inputs)
    if scheme.act_order:
        by_weight = weight.norm(dim=0).argsort(descending=True)
        groups = torch.empty_like(groups).index_copy_(0, by_weight, groups)
    num_groups, most = int(groups.max()) + 1, (1 << scheme.bits) - 1
    index = groups.expand(num_outputs, -1)
    zero = weight.new_zeros(num_outputs, num_groups)
    high = zero.scatter_reduce(1, index, weight, "amax")
    low = zero.scatter_reduce(1, index, weight, "amin")
    if scheme.symmetric:
        scales = torch.maximum(high, -low) / (most // 2)
        zeros = torch.full(scales.shape, most // 2 + 1)
    else:
        scales = (high - low) / most
        zeros = (-low / scales).round().long().clamp(1, most)
    scales = scales.half()
    codes = (weight / scales.double()[:, groups]).round().long() + zeros[:, groups]
    return Rounded(codes.clamp(0, most), scales, zeros, groups)


def _round_to_float8(weight: Tensor, scheme: Scheme) -> Rounded:
    num_outputs, num_inputs = weight.shape
    rows, columns = scheme.block or (1, num_inputs)
    blocks = torch.nn.functional.pad(weight, (0, -num_inputs % columns, 0, -num_outputs % rows))
    largest = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3))
    scales = (largest / 448).float()
    if scheme.has_powers_of_two:
        scales = scales.log2().ceil().exp2()
    scales = scales.repeat_interleave(rows, 0)[:num_outputs]
    groups = torch.arange(num_inputs) // columns
    codes = (weight / scales.double()[:, groups]).float().clamp(-448, 448).to(FLOAT8)
    return Rounded(codes, scales, torch.zeros(scales.shape, dtype=torch.int64), groups)


def _round_to_float4(weight: Tensor, scheme: Scheme) -> Rounded:
    assert scheme.group_len is not None
    largest = weight.unflatten(1, (-1, scheme.group_len)).abs().amax(dim=2)
    if scheme.layout == "mxfp4":
        exponents = (largest / 6).log2().ceil()
        scales, stored = exponents.exp2(), {"weight_scale": (exponents + 127).to(torch.uint8)}
    else:
        # The largest scale of all is the largest number of float8.
        factor = (448 * 6 / largest.max()).float()
        local = (largest / 6 * factor).clamp(min=2.0**-6).to(FLOAT8)
        scales, stored = (
            local.float() * (1 / factor) if scheme.layout == "modelopt" else local.float() / factor,
            {"weight_scale": local, "weight_global_scale": factor.view(1)},
        )
    groups = torch.arange(weight.shape[1]) // scheme.group_len
    numbers = torch.tensor(FLOAT4_NUMBERS, dtype=torch.float64)
    scaled = weight / scales.double()[:, groups]
    codes = numbers[(scaled.unsqueeze(-1) - numbers).abs().argmin(dim=-1)]
    return Rounded(codes, scales, torch.zeros(scales.shape, dtype=torch.int64), groups, stored)


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack unsigned numbers: [A, B] -> [A, B * bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(per_word) * bits
    words = (numbers.long().unflatten(1, (-1, per_word)) << shifts).sum(dim=2)
    return words.where(words < 1 << 31, words - (1 << 32)).int()


def _gptq(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    return {
        "qweight": pack_words(rounded.codes, scheme.bits).t(),
        "qzeros": pack_words(rounded.zeros.t() - 1, scheme.bits),  # minus 1, as in version 1 of the format
        "scales": rounded.scales.t(),
        "g_idx": rounded.groups.int(),
    }


def _gptq_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_len or -1,
        "desc_act": scheme.act_order,
        "sym": scheme.symmetric,
        "checkpoint_format": "gptq",
    }


def _awq(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    def pack(numbers: Tensor) -> Tensor:
        return pack_words(numbers.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), scheme.bits)

    return {
        "qweight": pack(rounded.codes.t()),
        "qzeros": pack(rounded.zeros.t()),
        "scales": rounded.scales.t(),
    }


def _awq_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": scheme.bits,
        "group_size": scheme.group_len or -1,
        "zero_point": True,
        "version": "gemm",
    }


def _packed(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack_words(rounded.codes, scheme.bits),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(rounded.codes.shape),
    }
    if not scheme.symmetric:
        tensors["weight_zero_point"] = pack_words(rounded.zeros.t(), scheme.bits).t()
    if scheme.act_order:
        tensors["weight_g_idx"] = rounded.groups.int()
    return tensors


def _codes(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    """Return unpacked codes: int8 or float8."""
    if scheme.is_float:
        return {"weight": rounded.codes, "weight_scale": rounded.scales}
    tensors = {"weight": (rounded.codes - 128).to(torch.int8), "weight_scale": rounded.scales}
    if not scheme.symmetric:
        tensors["weight_zero_point"] = (rounded.zeros - 128).to(torch.int8)
    return tensors


def _float4(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    numbers = torch.tensor(FLOAT4_NUMBERS, dtype=torch.float64)
    codes = (rounded.codes.unsqueeze(-1) - numbers).abs().argmin(dim=-1).to(torch.uint8)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, **rounded.stored_scales}


def _compressed_config(layout: str) -> Callable[[Scheme], dict[str, Any]]:
    def config(scheme: Scheme) -> dict[str, Any]:
        weights = {
            "num_bits": 8 if scheme.is_float and scheme.layout == "codes" else scheme.bits,
            "type": "float" if scheme.is_float else "int",
            "strategy": "group" if scheme.group_len else "channel",
            "group_size": scheme.group_len,
            "symmetric": scheme.symmetric,
            "actorder": "group" if scheme.act_order else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if scheme.is_float and scheme.layout == "codes" else layout,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    return config


def _float8(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    rows = 1 if scheme.block is None else scheme.block[0]
    scales = rounded.scales[::rows]
    if scheme.has_powers_of_two:
        scales = scales.to(torch.float8_e8m0fnu)
    return {"weight": rounded.codes, "weight_scale_inv": scales}


def _float8_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if scheme.block is None else list(scheme.block),
    }


def _modelopt(rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    tensors = {"input_scale": torch.ones(())}
    if scheme.group_len is None:
        stored = {
            "FP8": rounded.scales[0, 0],
            "FP8_PER_CHANNEL_PER_TOKEN": rounded.scales[:, 0],
            "FP8_PB_WO": rounded.scales[:: MODELOPT_BLOCK[0], None, :, None],
        }
        return tensors | {"weight": rounded.codes, "weight_scale": stored[_modelopt_algorithm(scheme)]}
    float4 = _float4(rounded, scheme)
    return tensors | {
        "weight": float4["weight_packed"],
        "weight_scale": float4["weight_scale"],
        "weight_scale_2": 1 / float4["weight_global_scale"].view(()),
    }


def _modelopt_algorithm(scheme: Scheme) -> str:
    if scheme.group_len is not None:
        return "NVFP4"
    if scheme.block is None:
        return "FP8_PER_CHANNEL_PER_TOKEN"
    return "FP8_PB_WO" if scheme.block == MODELOPT_BLOCK else "FP8"


def _modelopt_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": _modelopt_algorithm(scheme),
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt"},
    }


@dataclass(frozen=True, slots=True)
class Writer:
    """A checkpoint layout: the tensors of a layer and the quantization_config of config.json."""

    tensors: Callable[[Rounded, Scheme], dict[str, Tensor]]
    config: Callable[[Scheme], dict[str, Any]]


WRITERS = {
    "gptq": Writer(_gptq, _gptq_config),
    "awq": Writer(_awq, _awq_config),
    "packed": Writer(_packed, _compressed_config("pack-quantized")),
    "codes": Writer(_codes, _compressed_config("int-quantized")),
    "nvfp4": Writer(_float4, _compressed_config("nvfp4-pack-quantized")),
    "mxfp4": Writer(_float4, _compressed_config("mxfp4-pack-quantized")),
    "float8": Writer(_float8, _float8_config),
    "modelopt": Writer(_modelopt, _modelopt_config),
}
