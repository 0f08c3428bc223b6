"""Formats of a quantized model's layers by its configuration: the bytes that each takes on a GPU. Imports no torch.

The tensors of a checkpoint tell which layers it quantizes when it is read. Its configuration tells as much before the
weights are there, in lists whose patterns differ by method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from .named_layers import first_naming
from .quantization import (
    MODELOPT_BLOCK,
    MXFP4_GROUP_LEN,
    NVFP4_GROUP_LEN,
    Quantization,
    read_group_len,
    reading_config,
    weight_groups,
)

_FLOAT16_BYTES, _FLOAT32_BYTES, _ZERO_BYTES, _INDEX_BYTES = 2, 4, 2, 4
# Names of an expert's matrices in checkpoints that store each by itself |-> name of the stack of all experts.
_STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj"),
    "down_proj": ("down_proj", "w2"),
}

# Of DeepSeek-V4, where checkpoints with float4 experts have these in full precision without saying so.
_COMPRESSORS = tuple(
    f".{own}.{part}_proj" for own in ("compressor", "compressor.indexer") for part in ("kv", "gate")
)


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The memory of a quantized layer.

    Attributes:
        bits: per number.
        group_len: inputs that share a scale; None if all inputs of an output do.
        group_bytes: bytes of the scale and the zero point of a group, for each output.
        input_bytes: bytes of the group of an input, if groups consist of any inputs.
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
# The names that each layer of a model may have in a checkpoint, by its name in transformers.
LayerNames = Mapping[str, Sequence[str]]


def format_finder(quantization: Quantization, model: ModelConfig, layers: Iterable[str]) -> FindFormat:
    """Return a function that finds the format of a layer.

    Args:
        layers: names of the linear layers in transformers.

    Raises:
        ConfigError: the model's ``quantization_config`` cannot be read.
    """
    stored = model.hf.get("quantization_config")
    if quantization.is_online or stored is None:
        return lambda layer: LayerFormat(8, None, _FLOAT32_BYTES)
    with reading_config(model.name):
        return _FINDERS[quantization.method](
            quantization, stored, {layer: _stored_names(layer) for layer in layers}
        )


def _gptq(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    usual = _gptq_format(quantization.bits, quantization.group_len, stored)
    only = {name for names in stored.get("modules_in_block_to_quantize") or [] for name in _listed(names)}
    dynamic = stored.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError(f"dynamic {dynamic!r:.100} is no JSON object")
    formats = [_dynamic_format(pattern, own, quantization, stored) for pattern, own in dynamic.items()]
    own_format = first_naming([[f"re:{_expression(pattern)}"] for pattern in dynamic], layers)

    def find(layer: str) -> LayerFormat | None:
        if only and not any(end in only for name in layers[layer] for end in _ends(name)):
            return None
        return formats[own_format[layer]] if layer in own_format else usual

    return find


def _expression(pattern: str) -> str:
    return pattern[2:] if pattern.startswith(("-:", "+:")) else pattern


def _dynamic_format(
    pattern: str, own: dict[str, Any], quantization: Quantization, stored: dict[str, Any]
) -> LayerFormat | None:
    """Return the format of the layers of an entry of ``dynamic``; ``-:`` leaves them in full precision."""
    if pattern.startswith("-:"):
        return None
    bits = own.get("bits", quantization.bits)
    if type(bits) is not int or not 1 <= bits <= 32:
        raise ValueError(f"bits of dynamic {bits!r:.100}")
    return _gptq_format(bits, read_group_len(own.get("group_size", stored.get("group_size"))), stored)


def _gptq_format(bits: int, group_len: int | None, stored: dict[str, Any]) -> LayerFormat:
    # Zero points in the middle of 8 bits are left out.
    zero_bytes = 0 if bits == 8 and stored.get("sym", True) else _ZERO_BYTES
    return LayerFormat(
        bits,
        group_len,
        _FLOAT16_BYTES + zero_bytes,
        _INDEX_BYTES if stored.get("desc_act") and group_len else 0,
    )


def _awq(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    usual = LayerFormat(quantization.bits, quantization.group_len, _FLOAT16_BYTES + _ZERO_BYTES)
    return _unless(stored.get("modules_to_not_convert"), usual, layers)


def _compressed(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    groups = weight_groups(stored)
    formats = [_compressed_format(group, stored, quantization) for group in groups]
    targets = [_listed(group.get("targets")) for group in groups]
    named = first_naming([_listed(stored.get("ignore")), *targets], layers)
    of_named = [None, *formats]
    # Groups name layers, or the class of all.
    of_all = [own for own, each in zip(formats, targets, strict=True) if not each or "Linear" in each]
    of_others = of_all[0] if of_all else None
    return lambda layer: of_named[named[layer]] if layer in named else of_others


def _compressed_format(
    group: dict[str, Any], stored: dict[str, Any], quantization: Quantization
) -> LayerFormat:
    weights, layout = group["weights"], group.get("format") or stored.get("format")
    bits, size = int(weights["num_bits"]), weights.get("group_size")
    size = None if size is None or size == 0 else read_group_len(size)
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
        size,
        _FLOAT32_BYTES if is_float else _FLOAT16_BYTES + (_ZERO_BYTES if has_zeros else 0),
        _INDEX_BYTES if weights.get("actorder") in ("group", True) else 0,
    )


def _float8(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    group_len = None if quantization.block_shape is None else quantization.block_shape[1]
    usual = LayerFormat(8, group_len, _FLOAT32_BYTES)
    find = _unless(stored.get("modules_to_not_convert") or stored.get("ignored_layers"), usual, layers)
    if not quantization.has_float4_experts:
        return find
    experts = LayerFormat(4, MXFP4_GROUP_LEN, _FLOAT16_BYTES)

    def find_published(layer: str) -> LayerFormat | None:
        if layer.endswith(_COMPRESSORS) or find(layer) is None:
            return None
        return experts if ".experts." in layer else usual

    return find_published


def _mxfp4(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    experts = LayerFormat(4, MXFP4_GROUP_LEN, _FLOAT16_BYTES)
    find = _unless(stored.get("modules_to_not_convert"), experts, layers)
    return lambda layer: find(layer) if ".experts." in layer else None


def _modelopt(quantization: Quantization, stored: dict[str, Any], layers: LayerNames) -> FindFormat:
    algorithm = str(stored["quant_algo"]).upper()
    if algorithm != "MIXED_PRECISION":
        usual = _modelopt_format(algorithm, quantization.group_len)
        return _unless(stored.get("ignore") or stored.get("exclude_modules"), usual, layers)
    of_layers = {
        name: _modelopt_format(str(own["quant_algo"]).upper(), own.get("group_size"))
        for name, own in (stored.get("quantized_layers") or {}).items()
    }
    return lambda layer: next((of_layers[name] for name in layers[layer] if name in of_layers), None)


def _modelopt_format(algorithm: str, group_len: int | None) -> LayerFormat:
    if algorithm == "NVFP4":
        return LayerFormat(4, read_group_len(group_len or NVFP4_GROUP_LEN), _FLOAT32_BYTES)
    return LayerFormat(8, MODELOPT_BLOCK[1] if algorithm == "FP8_PB_WO" else None, _FLOAT32_BYTES)


_FINDERS: dict[str, Callable[[Quantization, dict[str, Any], LayerNames], FindFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed": _compressed,
    "float8": _float8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def _unless(ignored: Any, usual: LayerFormat, layers: LayerNames) -> FindFormat:
    """Return a function that finds the same format for all layers but those that are named."""
    named = first_naming([_listed(ignored)], layers)
    return lambda layer: None if layer in named else usual


def _listed(entries: Any) -> Sequence[str]:
    """Return the strings of a setting: a list, a single one, or None for none. Raises ValueError otherwise."""
    found = [entries] if isinstance(entries, str) else entries or []
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise ValueError(f"{entries!r:.100} is no list of layers' names")
    return found


def _stored_names(layer: str) -> Sequence[str]:
    """Return the names that a layer may have in a checkpoint, or in its configuration."""
    block, _, last = layer.rpartition(".")
    own = [layer]
    if block.endswith(".experts"):
        own += [f"{block}.0.{part}" for part in _STACKED.get(last, (last,))]
    names = []
    for name in own:
        names += [name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)]
    return names


def _ends(name: str) -> Sequence[str]:
    """Return the ends of a name that begin after a dot."""
    return [name[index + 1 :] for index, letter in enumerate(name) if letter == "."]
