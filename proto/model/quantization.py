"""Quantization: the format of a model's quantized linear layers. Imports no torch.

A quantized checkpoint has a ``quantization_config`` in its config.json. For a checkpoint in full precision, the
``quantization`` option requests online quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError, first_line, in_one_line

# Values of the `quantization` option: 8-bit integers, or 8-bit floating point (e4m3).
ONLINE_METHODS = ("int8", "fp8")

COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
COMPRESSED_WEIGHTS = (("int", 4), ("int", 8), ("float", 4), ("float", 8))
# Numbers of an MXFP4 weight that share a scale.
MXFP4_GROUP_LEN = 32
# Numbers of an NVFP4 weight that share a scale.
NVFP4_GROUP_LEN = 16
# Outputs and inputs that share a scale in modelopt's FP8_PB_WO.
MODELOPT_BLOCK = (128, 128)
# Algorithms of modelopt; with MIXED_PRECISION, of its layers.
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of the linear layers.

    Attributes:
        method: one of ONLINE_METHODS, applied while a full-precision checkpoint is read; or the layout of a quantized
            checkpoint: ``awq``, ``gptq``, ``compressed``, ``float8``, ``mxfp4`` or ``modelopt``.
        bits: per number; unused for ``compressed``, where the tensors' shapes determine it. Layers of ``gptq`` may
            have other bits and groups, which their shapes show (``dynamic``).
        group_len: inputs that share a scale; None if all inputs of an output do. Unused for ``compressed``.
        zero_offset: added to the stored zero points of ``gptq``.
        block_shape: outputs and inputs that share a scale, if scales are per block.
        has_float4_experts: the routed experts of a ``float8`` checkpoint are in MXFP4.
    """

    method: str
    bits: int = 8
    group_len: int | None = None
    zero_offset: int = 0
    block_shape: tuple[int, int] | None = None
    has_float4_experts: bool = False

    @property
    def shard_multiple(self) -> int:
        """Return the length of which each rank's part of an expert's inputs has to be a multiple."""
        return MXFP4_GROUP_LEN if self.method == "mxfp4" or self.has_float4_experts else 1

    @property
    def is_online(self) -> bool:
        return self.method in ONLINE_METHODS


def read_quantization(model: ModelConfig) -> Quantization | None:
    """Return the quantization of the model's linear layers. Returns None if there is none.

    Raises:
        ConfigError: the method or variant is not supported; or online quantization is requested for a checkpoint
            that is quantized already.
    """
    stored = model.hf.get("quantization_config") or None
    if stored is not None and not isinstance(stored, dict):
        raise ConfigError(f"{model.name}: its quantization_config is not a JSON object")
    if model.quantization is not None:
        return _online_quantization(model, stored)
    if stored is None:
        return None
    given = stored.get("quant_method")
    method = str(given)
    reader = _METHODS.get(method)
    if reader is None:
        hint = f" ({_REFUSED[method]})" if method in _REFUSED else ""
        raise ConfigError(
            f"{model.name}: quantization method {given!r:.100} is not supported{hint}; "
            f"supported: {', '.join(_METHODS)}"
        )
    # Older releases of transformers leave that of DeepSeek-V4 beside the quantization_config.
    stored = {"expert_dtype": model.hf.get("expert_dtype"), **stored}
    try:
        with reading_config(model.name):
            return reader(stored)
    except _Unsupported as error:
        raise ConfigError(f"{model.name}: {method} {first_line(error)}") from error


class _Unsupported(Exception):
    """A setting that can be read has a value that is not supported."""


@contextmanager
def reading_config(name: str) -> Iterator[None]:
    """Raise the errors of code that reads a quantization_config, whose values may have any type, as ConfigError.

    Args:
        name: the model's name, for errors.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{name}: its quantization_config cannot be read: {in_one_line(error)}") from error


def _online_quantization(model: ModelConfig, stored: dict[str, Any] | None) -> Quantization:
    method = model.quantization
    if method not in ONLINE_METHODS:
        raise ConfigError(f"quantization is {method!r}, must be {' or '.join(ONLINE_METHODS)}")
    if stored:
        raise ConfigError(
            f"{model.name}: quantization {method} needs a checkpoint in full precision, but this one is quantized "
            f"already ({stored.get('quant_method', 'unknown')}); leave the option out"
        )
    return Quantization(method)


def _read_gptq(stored: dict[str, Any]) -> Quantization:
    _require("bits", stored["bits"], (4, 8))
    layout = stored.get("checkpoint_format") or "gptq"
    _require("checkpoint_format", layout, ("gptq", "gptq_v2"))
    zero_offset = 1 if layout == "gptq" else 0
    return Quantization("gptq", stored["bits"], read_group_len(stored["group_size"]), zero_offset)


def _read_awq(stored: dict[str, Any]) -> Quantization:
    _require("bits", stored.get("bits", stored.get("w_bit")), (4,))
    _require("version", str(stored.get("version", "gemm")).lower(), ("gemm",))
    return Quantization("awq", 4, read_group_len(stored.get("group_size", stored.get("q_group_size"))))


def _read_compressed(stored: dict[str, Any]) -> Quantization:
    # The status says little: "frozen" is published for weights that are stored quantized. Their dtype decides.
    sparsity = (stored.get("sparsity_config") or {}).get("format") or "dense"
    _require("sparsity format", sparsity, ("dense",))
    block_shape = None
    for group in weight_groups(stored):
        layout = group.get("format") or stored.get("format")
        _require("format", layout, COMPRESSED_FORMATS)
        weights = group["weights"]
        _require("weights", (weights["type"], weights["num_bits"]), COMPRESSED_WEIGHTS)
        if weights.get("block_structure"):
            block_shape = _pair(weights["block_structure"])
    return Quantization("compressed", block_shape=block_shape)


def weight_groups(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of compressed-tensors' configuration that quantize weights, not only activations or KV."""
    return [group for group in stored["config_groups"].values() if group.get("weights", ()) is not None]


def _read_float8(stored: dict[str, Any]) -> Quantization:
    _require("fmt", stored.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    size, expert_dtype = stored.get("weight_block_size"), stored.get("expert_dtype") or "fp8"
    _require("expert_dtype", expert_dtype, ("fp8", "fp4"))
    return Quantization(
        "float8",
        block_shape=None if size is None else _pair(size),
        has_float4_experts=expert_dtype == "fp4",
    )


def _read_mxfp4(stored: dict[str, Any]) -> Quantization:
    return Quantization("mxfp4", 4, MXFP4_GROUP_LEN)


def _read_modelopt(stored: dict[str, Any]) -> Quantization:
    algorithm = str(stored["quant_algo"]).upper()
    _require("quant_algo", algorithm, (*MODELOPT_ALGORITHMS, "MIXED_PRECISION"))
    if algorithm == "NVFP4":
        return Quantization("modelopt", 4, read_group_len(stored.get("group_size") or NVFP4_GROUP_LEN))
    if algorithm == "MIXED_PRECISION":
        for own in (stored.get("quantized_layers") or {}).values():
            _require("quant_algo of a layer", str(own["quant_algo"]).upper(), MODELOPT_ALGORITHMS)
    return Quantization("modelopt", block_shape=MODELOPT_BLOCK)


_METHODS: dict[str, Callable[[dict[str, Any]], Quantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_float8,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
}


# Methods that are refused on purpose |-> what to take instead.
_REFUSED = {
    "bitsandbytes": "its kernels multiply on GPUs only; take the model in full precision, with --quantization int8",
    "gguf": "take the model in safetensors that it was made from, with --quantization int8",
}


def read_group_len(value: Any) -> int | None:
    """Return the length of a group; None for -1, all inputs. Raises ValueError if it is not a positive number."""
    if value == -1:
        return None
    if type(value) is not int or value < 1:
        raise ValueError(f"group size {value!r:.100}")
    return value


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, str):  # compressed-tensors also writes "128x128"
        value = value.split("x")
    rows, columns = map(int, value)
    if rows < 1 or columns < 1:
        raise ValueError(f"block size {rows} x {columns}")
    return rows, columns


def _require(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known or isinstance(value, float):
        raise _Unsupported(f"{name} {value!r:.100} is not supported; supported: {', '.join(map(str, known))}")
