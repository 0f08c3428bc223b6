"""Formats of a quantized model's layers by its configuration: the bytes that each takes on a GPU. Imports no torch.

The tensors of a checkpoint tell which layers it quantizes when it is read. Its configuration tells as much before the
weights are there, in lists whose patterns differ by method.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .quantization import (
    MODELOPT_BLOCK,
    MXFP4_GROUP_LEN,
    NVFP4_GROUP_LEN,
    Quantization,
    weight_groups,
)

_FLOAT16_BYTES, _FLOAT32_BYTES, _ZERO_BYTES, _INDEX_BYTES = 2, 4, 2, 4
# Names of an expert's matrices in checkpoints that store each by itself |-> name of the stack of all experts.
_STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj"),
    "down_proj": ("down_proj", "w2"),
}


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The memory of a quantized layer.

    Attributes:
        bits: per number.
        group_len: inputs that share a scale; None if all inputs of an output do.
        group_bytes: of the scale and the zero point of a group, for each output.
        input_bytes: of the group of an input, if groups consist of any inputs.
    """

    bits: int
    group_len: int | None
    group_bytes: int
    input_bytes: int = 0

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the bytes of a matrix."""
        num_groups = 1 if self.group_len is None else -(-num_inputs // self.group_len)
        of_output = num_inputs * self.bits // 8 + num_groups * self.group_bytes
        return num_outputs * of_output + num_inputs * self.input_bytes


# Name of a layer in transformers |-> its format, or None for full precision.
FindFormat = Callable[[str], LayerFormat | None]


def format_finder(quantization: Quantization, stored: dict[str, Any] | None) -> FindFormat:
    """Return a function that finds the format of a layer.

    Args:
        stored: ``quantization_config``; None for online quantization.
    """
    if quantization.is_online or stored is None:
        return lambda layer: LayerFormat(8, None, _FLOAT32_BYTES)
    return _FINDERS[quantization.method](quantization, stored)


def _gptq(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    usual = _gptq_format(quantization.bits, quantization.group_len, stored)
    only = [name for names in stored.get("modules_in_block_to_quantize") or [] for name in _listed(names)]
    dynamic: dict[str, Any] = stored.get("dynamic") or {}

    def find(layer: str) -> LayerFormat | None:
        if only and not any(name.endswith(f".{each}") for name in _stored_names(layer) for each in only):
            return None
        for pattern, own in dynamic.items():
            expression = pattern[2:] if pattern.startswith(("-:", "+:")) else pattern
            if not any(re.match(expression, name) for name in _stored_names(layer)):
                continue
            if pattern.startswith("-:"):
                return None
            size = own.get("group_size", stored.get("group_size"))
            return _gptq_format(own.get("bits", quantization.bits), None if size == -1 else size, stored)
        return usual

    return find


def _gptq_format(bits: int, group_len: int | None, stored: dict[str, Any]) -> LayerFormat:
    # Zero points in the middle of 8 bits are left out.
    zero_bytes = 0 if bits == 8 and stored.get("sym", True) else _ZERO_BYTES
    return LayerFormat(
        bits,
        group_len,
        _FLOAT16_BYTES + zero_bytes,
        _INDEX_BYTES if stored.get("desc_act") and group_len else 0,
    )


def _awq(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    usual = LayerFormat(quantization.bits, quantization.group_len, _FLOAT16_BYTES + _ZERO_BYTES)
    return _unless(stored.get("modules_to_not_convert"), usual)


def _compressed(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    groups = [
        (_listed(group.get("targets")), _compressed_format(group, stored, quantization))
        for group in weight_groups(stored)
    ]
    ignored = _listed(stored.get("ignore"))

    def find(layer: str) -> LayerFormat | None:
        if _is_named(layer, ignored):
            return None
        # Groups name layers, or the class of all.
        by_name = (own for targets, own in groups if _is_named(layer, targets))
        of_all = (own for targets, own in groups if not targets or "Linear" in targets)
        return next(by_name, None) or next(of_all, None)

    return find


def _compressed_format(
    group: dict[str, Any], stored: dict[str, Any], quantization: Quantization
) -> LayerFormat:
    weights, layout = group["weights"], group.get("format") or stored.get("format")
    bits, size = int(weights["num_bits"]), weights.get("group_size")
    if layout == "nvfp4-pack-quantized":
        return LayerFormat(4, size or NVFP4_GROUP_LEN, _FLOAT32_BYTES)
    if layout == "mxfp4-pack-quantized":
        return LayerFormat(4, size or MXFP4_GROUP_LEN, _FLOAT16_BYTES)
    if weights.get("block_structure") and quantization.block_shape is not None:
        size = quantization.block_shape[1]
    is_float = weights["type"] == "float"
    has_zeros = bits == 4 or not weights.get("symmetric", True)
    return LayerFormat(
        bits,
        size if isinstance(size, int) and size > 0 else None,
        _FLOAT32_BYTES if is_float else _FLOAT16_BYTES + (_ZERO_BYTES if has_zeros else 0),
        _INDEX_BYTES if weights.get("actorder") in ("group", True) else 0,
    )


def _float8(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    group_len = None if quantization.block_shape is None else quantization.block_shape[1]
    usual = LayerFormat(8, group_len, _FLOAT32_BYTES)
    return _unless(stored.get("modules_to_not_convert") or stored.get("ignored_layers"), usual)


def _mxfp4(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    experts = LayerFormat(4, MXFP4_GROUP_LEN, _FLOAT16_BYTES)
    find = _unless(stored.get("modules_to_not_convert"), experts)
    return lambda layer: find(layer) if ".experts." in layer else None


def _modelopt(quantization: Quantization, stored: dict[str, Any]) -> FindFormat:
    algorithm = str(stored["quant_algo"]).upper()
    if algorithm != "MIXED_PRECISION":
        usual = _modelopt_format(algorithm, quantization.group_len)
        return _unless(stored.get("ignore") or stored.get("exclude_modules"), usual)
    of_layers = {
        name: _modelopt_format(str(own["quant_algo"]).upper(), own.get("group_size"))
        for name, own in (stored.get("quantized_layers") or {}).items()
    }
    return lambda layer: next((of_layers[name] for name in _stored_names(layer) if name in of_layers), None)


def _modelopt_format(algorithm: str, group_len: int | None) -> LayerFormat:
    if algorithm == "NVFP4":
        return LayerFormat(4, group_len or NVFP4_GROUP_LEN, _FLOAT32_BYTES)
    return LayerFormat(8, MODELOPT_BLOCK[1] if algorithm == "FP8_PB_WO" else None, _FLOAT32_BYTES)


_FINDERS: dict[str, Callable[[Quantization, dict[str, Any]], FindFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed": _compressed,
    "float8": _float8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def _unless(ignored: Any, usual: LayerFormat) -> FindFormat:
    """Return a function that finds the same format for all layers but those that are named."""
    patterns = _listed(ignored)
    return lambda layer: None if _is_named(layer, patterns) else usual


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in value or []]


def _is_named(layer: str, patterns: Sequence[str]) -> bool:
    """Return whether patterns name a layer, a module that it is part of, or a part of its name."""
    return any(_matches(pattern, name) for pattern in patterns for name in _stored_names(layer))


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
    return f".{pattern.strip('.')}." in f".{name}."


def _stored_names(layer: str) -> Iterator[str]:
    """Yield the names that a layer may have in a checkpoint, or in its configuration."""
    block, _, last = layer.rpartition(".")
    own = [layer]
    if block.endswith(".experts"):
        own += [f"{block}.0.{part}" for part in _STACKED.get(last, (last,))]
    for name in own:
        yield name
        yield f"language_model.{name}"
        yield name.replace("model.", "model.language_model.", 1)
