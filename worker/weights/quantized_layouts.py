"""Storage layouts of quantized linear layers in checkpoints, read slice by slice.

- gptq (Frantar et al., 2023): ``qweight`` [K / 8, N] int32, eight adjacent inputs per word, the first in the lowest
  bits; ``qzeros`` [G, N / 8], eight adjacent outputs; ``scales`` [G, N]; ``g_idx`` [K], the group of each input.
- awq (Lin et al., 2024, in its GEMM version): ``qweight`` [K, N / 8] and ``qzeros`` [G, N / 8], eight adjacent
  outputs in AWQ_ORDER; ``scales`` [G, N].
- compressed (compressed-tensors): ``weight_packed`` [N, K / 8] int32, or ``weight`` [N, K] int8 or float8;
  ``weight_scale`` [N, G], or one for all, or one per block; optionally ``weight_zero_point`` and ``weight_g_idx``.
  In NVFP4 and MXFP4, ``weight_packed`` [N, K / 2] uint8 has two float4 codes per byte; ``weight_scale`` is float8 and
  divided by ``weight_global_scale``, or uint8, powers of two (e8m0).
- float8 (as published for DeepSeek-V3 and Qwen3): ``weight`` [N, K]; ``weight_scale_inv`` per block, or
  ``weight_scale``; both are factors, float32 or e8m0. A ``weight`` [N, K / 2] int8 has two float4 codes per byte,
  and scales per group, as of the experts of DeepSeek-V4.
- mxfp4 (Rouhani et al., *Microscaling Data Formats for Deep Learning*, 2023; as published for gpt-oss):
  ``weight_blocks`` [N, K / 32, 16] uint8, two float4 codes per byte; ``weight_scales`` [N, K / 32] uint8, powers of
  two (e8m0). Of a layer's experts they are stacked.
- modelopt (NVIDIA's Model Optimizer): ``weight`` [N, K] float8 with one ``weight_scale``, one per output, or one per
  block, [N / 128, 1, K / 128, 1]; in NVFP4, ``weight`` [N, K / 2] uint8 has two float4 codes per byte, and
  ``weight_scale`` is float8 and multiplied by ``weight_scale_2``. The dtypes and shapes of a layer show which it is.

A layer in full precision has a plain ``weight`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.quantized_linear import FLOAT4, FLOAT8, QuantizedWeight, pack_nibbles, unpack_nibbles
from ...proto.errors import ConfigError, ModelLoadError
from ...proto.model.quantization import MXFP4_GROUP_LEN, Quantization
from .checkpoint import CPU, Checkpoint
from .weight_slice import Range, WeightSlice

# Output of each of the eight elements of a word, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = 32
# Offset between the unsigned and the signed form of an 8-bit weight.
SIGN = 128
# Dtypes of weights that are stored unpacked.
CODE_TYPES = (torch.int8, FLOAT8)
# Dtypes of scales that are powers of two (e8m0).
POWER_TYPES = (torch.uint8, torch.float8_e8m0fnu)
# Stored beside a weight for quantized activations; unused, since activations are more precise here.
UNUSED = (
    "weight_shape",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "activation_scale",
    "k_scale",
    "v_scale",
)

# Reads the codes to a device, and unpacks them there; the smaller tensors stay in memory.
Reader = Callable[[Checkpoint, WeightSlice, Quantization, torch.device], QuantizedWeight | None]


def read_quantized(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    """Read a slice of a quantized matrix to a device.

    Returns:
        None if the checkpoint stores the matrix in full precision.

    Raises:
        ModelLoadError: a tensor is missing or has another shape, or a group is out of range.
        ConfigError: the slice begins or ends inside a word that packs several elements.
    """
    weight = _READERS[quantization.method](checkpoint, part, quantization, device)
    if weight is None:
        return None
    weight = weight.to(device)
    if part.interleaving is None:
        return weight
    return weight.reordered(part.interleaving.order(weight.out_features))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The quantization groups of a slice's inputs.

    Attributes:
        count: groups of the whole layer.
        range: the groups that the slice needs.
        index: [K] int32, the group of each input of the slice, relative to the first of `range`; None if the groups
            are runs of equal length.
    """

    count: int
    range: Range
    index: Tensor | None = None


def _read_gptq(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.scales"):
        return None
    num_outputs, num_inputs = part.shape
    quantization = _of_layer(checkpoint, part, quantization)
    per_word, stored = WORD_BITS // quantization.bits, None
    if checkpoint.has(f"{part.name}.g_idx"):
        stored = checkpoint.read(f"{part.name}.g_idx", (num_inputs,), part.inputs)
    scales, groups = _read_scales_by_group(checkpoint, part, quantization, stored)
    words = _read_words(
        checkpoint,
        f"{part.name}.qweight",
        (num_inputs // per_word, num_outputs),
        _in_words(part, part.inputs, per_word),
        part.outputs,
        device=device,
    )
    zeros = _read_words(
        checkpoint,
        f"{part.name}.qzeros",
        (groups.count, num_outputs // per_word),
        groups.range,
        _in_words(part, part.outputs, per_word),
    )
    checkpoint.ignore_if_zero(f"{part.name}.bias")
    bytes_of_words = words.view(torch.uint8).view(*words.shape, 4)
    codes = bytes_of_words.transpose(0, 1).flatten(1)
    zeros = _unpack(zeros, quantization.bits).to(torch.int16) + quantization.zero_offset
    return _unsigned(codes, quantization.bits, scales, zeros, groups)


def _of_layer(checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization) -> Quantization:
    """Return the bits and groups of a layer of gptq, which may differ from those of the model."""
    num_inputs = part.shape[1]
    num_words, num_groups = (
        checkpoint.shape_of(f"{part.name}.qweight")[0],
        checkpoint.shape_of(f"{part.name}.scales")[0],
    )
    bits, group_len = WORD_BITS * num_words // num_inputs, quantization.group_len or num_inputs
    if -(-num_inputs // group_len) != num_groups:
        group_len = _even_group_len(part, num_groups)
    return replace(quantization, bits=bits if bits in (4, 8) else quantization.bits, group_len=group_len)


def _read_awq(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.scales"):
        return None
    (num_outputs, num_inputs), per_word = part.shape, len(AWQ_ORDER)
    scales, groups = _read_scales_by_group(checkpoint, part, quantization)
    outputs = _in_words(part, part.outputs, per_word)
    words = _read_words(
        checkpoint,
        f"{part.name}.qweight",
        (num_inputs, num_outputs // per_word),
        part.inputs,
        outputs,
        device=device,
    )
    zeros = _read_words(
        checkpoint, f"{part.name}.qzeros", (groups.count, num_outputs // per_word), groups.range, outputs
    )
    codes = pack_nibbles(_unpack_awq(words).t())
    return _unsigned(codes, quantization.bits, scales, _unpack_awq(zeros).to(torch.int16), groups)


def _read_compressed(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.weight_packed"):
        return _read_codes(checkpoint, part, quantization, device)
    if checkpoint.dtype_of(f"{part.name}.weight_packed") == torch.uint8:
        return _read_float4(checkpoint, part, "weight_packed", "weight_scale", device)
    (num_outputs, num_inputs), shape = part.shape, checkpoint.shape_of(f"{part.name}.weight_packed")
    bits = WORD_BITS * shape[1] // num_inputs if len(shape) == 2 else 0
    if bits not in (4, 8):
        raise ModelLoadError(
            f"'{part.name}.weight_packed' has shape {list(shape)}, expected 4 or 8 bits for each of "
            f"{num_outputs} x {num_inputs} numbers"
        )
    per_word = WORD_BITS // bits
    scales, groups = _read_scales(checkpoint, f"{part.name}.weight_scale", part, None)
    words = _read_words(
        checkpoint,
        f"{part.name}.weight_packed",
        (num_outputs, num_inputs // per_word),
        part.outputs,
        _in_words(part, part.inputs, per_word),
        device=device,
    )
    zeros = _read_zeros(checkpoint, part, groups, bits)
    _ignore_unused(checkpoint, part)
    middle = 1 << bits - 1
    zeros = torch.full(scales.shape, middle, dtype=torch.int16) if zeros is None else zeros + middle
    return _unsigned(words.view(torch.uint8), bits, scales, zeros, groups)


def _read_float4(
    checkpoint: Checkpoint, part: WeightSlice, codes_name: str, scales_name: str, device: torch.device
) -> QuantizedWeight:
    """Read a slice in NVFP4 or MXFP4 whose codes and scales have these names."""
    (num_outputs, num_inputs), name = part.shape, f"{part.name}.{scales_name}"
    num_groups = max(1, checkpoint.shape_of(name)[-1])
    groups = _find_groups(part, num_groups, -(-num_inputs // num_groups))
    stored = checkpoint.read(name, (num_outputs, num_groups), part.outputs, groups.range)
    if stored.dtype in POWER_TYPES:
        scales = _powers_of_two(stored)
    else:
        scales = _scale_all(checkpoint, part, stored.float())
    codes = checkpoint.read(
        f"{part.name}.{codes_name}",
        (num_outputs, num_inputs // 2),
        part.outputs,
        _in_words(part, part.inputs, 2),
        device=device,
    )
    _ignore_unused(checkpoint, part)
    return QuantizedWeight(codes.view(FLOAT4), scales.t().contiguous(), None, groups.index)


def _scale_all(checkpoint: Checkpoint, part: WeightSlice, scales: Tensor) -> Tensor:
    """Apply the scale of the whole layer: compressed-tensors stores a divisor, and modelopt a factor."""
    divisor, factor = f"{part.name}.weight_global_scale", f"{part.name}.weight_scale_2"
    if checkpoint.has(factor):
        return scales * checkpoint.read(factor, checkpoint.shape_of(factor)).float().view(1)
    return scales / checkpoint.read(divisor, checkpoint.shape_of(divisor)).float().view(1)


def _read_modelopt(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    name = f"{part.name}.weight"
    if checkpoint.has(name) and checkpoint.dtype_of(name) == torch.uint8:
        return _read_float4(checkpoint, part, "weight", "weight_scale", device)
    return _read_codes(checkpoint, part, quantization, device)


def _read_float8(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    name = f"{part.name}.weight"
    if checkpoint.has(name) and checkpoint.dtype_of(name) == torch.int8:
        return _read_float4(checkpoint, part, "weight", "weight_scale_inv", device)
    return _read_codes(checkpoint, part, quantization, device)


def _read_codes(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    """Read weights of 8 bits that are stored unpacked."""
    scale_names = f"{part.name}.weight_scale_inv", f"{part.name}.weight_scale"
    name = next((name for name in scale_names if checkpoint.has(name)), scale_names[-1])
    weight_name = f"{part.name}.weight"
    if not checkpoint.has(weight_name):
        return None
    dtype = checkpoint.dtype_of(weight_name)
    if dtype not in CODE_TYPES:
        if checkpoint.has(name):
            raise ModelLoadError(
                f"{weight_name!r} is stored as {dtype} beside its scales; save the checkpoint in its compressed form"
            )
        return None
    scales, groups = _read_scales(checkpoint, name, part, quantization.block_shape)
    codes = checkpoint.read(weight_name, part.shape, part.outputs, part.inputs, device=device)
    zeros = _read_zeros(checkpoint, part, groups, 8)
    _ignore_unused(checkpoint, part)
    return QuantizedWeight(codes, scales, _unless_zero(zeros), groups.index)


def _read_mxfp4(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, device: torch.device
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.weight_blocks"):
        return None
    (num_outputs, num_inputs), (start, length) = part.shape, part.inputs
    if start % MXFP4_GROUP_LEN or length % MXFP4_GROUP_LEN:
        raise ConfigError(
            f"{part.name}: a rank's slice from {start} to {start + length} is not aligned to groups of "
            f"{MXFP4_GROUP_LEN} numbers; use a smaller tensor_parallel_size"
        )
    num_groups = num_inputs // MXFP4_GROUP_LEN
    groups = start // MXFP4_GROUP_LEN, length // MXFP4_GROUP_LEN
    shape = num_outputs, num_groups, MXFP4_GROUP_LEN // 2
    blocks = checkpoint.read(f"{part.name}.weight_blocks", shape, part.outputs, groups, device=device)
    scales = checkpoint.read(f"{part.name}.weight_scales", (num_outputs, num_groups), part.outputs, groups)
    return QuantizedWeight(blocks.flatten(1).view(FLOAT4), _powers_of_two(scales).t().contiguous())


_READERS: dict[str, Reader] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed": _read_compressed,
    "float8": _read_float8,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
}


def _read_scales_by_group(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, stored: Tensor | None = None
) -> tuple[Tensor, _Groups]:
    """Read the scales [G, N] of a slice from gptq or awq, and find its groups; `stored` as for _find_groups."""
    num_outputs, num_inputs = part.shape
    group_len = quantization.group_len or num_inputs
    groups = _find_groups(part, -(-num_inputs // group_len), group_len, stored)
    name, shape = f"{part.name}.scales", (groups.count, num_outputs)
    return checkpoint.read(name, shape, groups.range, part.outputs), groups


def _read_scales(
    checkpoint: Checkpoint, name: str, part: WeightSlice, block_shape: tuple[int, int] | None
) -> tuple[Tensor, _Groups]:
    """Read the scales [G, N] of a slice, stored per block, group or output or for all, and find its groups."""
    (num_outputs, num_inputs), shape = part.shape, checkpoint.shape_of(name)
    if shape in ((), (1,)):
        scale = checkpoint.read(name, shape, *((0, 1) for _ in shape))
        return scale.reshape(1, 1).repeat(1, part.outputs[1]), _Groups(1, (0, 1))
    if shape == (num_outputs,):
        return checkpoint.read(name, shape, part.outputs).unsqueeze(0), _Groups(1, (0, 1))
    of_blocks = len(shape) == 4  # modelopt's
    if of_blocks:
        shape = shape[0], shape[2]
    if block_shape is not None and shape[0] != num_outputs:
        block_outputs, group_len = block_shape
    else:
        block_outputs, group_len = 1, _even_group_len(part, shape[-1])
    stored = None
    if checkpoint.has(f"{part.name}.weight_g_idx"):
        stored = checkpoint.read(f"{part.name}.weight_g_idx", (num_inputs,), part.inputs)
        # All -1 if the inputs are not reordered.
        stored = None if (stored < 0).all() else stored
    groups = _find_groups(part, -(-num_inputs // group_len), group_len, stored)
    start, length = part.outputs
    first, last = start // block_outputs, (start + length - 1) // block_outputs
    num_blocks, of_slice = -(-num_outputs // block_outputs), (first, last + 1 - first)
    if of_blocks:
        expected = num_blocks, 1, groups.count, 1
        scales = checkpoint.read(name, expected, of_slice, (0, 1), groups.range)[:, 0, :, 0]
    else:
        scales = checkpoint.read(name, (num_blocks, groups.count), of_slice, groups.range)
    if scales.dtype in POWER_TYPES:
        scales = _powers_of_two(scales)
    rows = torch.arange(start, start + length) // block_outputs - first
    return scales[rows].t().contiguous(), groups


def _read_zeros(checkpoint: Checkpoint, part: WeightSlice, groups: _Groups, bits: int) -> Tensor | None:
    """Read the zero points [G, N] int16 of a compressed slice, stored unpacked or in words of adjacent outputs."""
    name = f"{part.name}.weight_zero_point"
    if not checkpoint.has(name):
        return None
    num_outputs = part.shape[0]
    if checkpoint.dtype_of(name) == torch.int8:
        zeros = checkpoint.read(name, (num_outputs, groups.count), part.outputs, groups.range)
        return zeros.t().to(torch.int16)
    per_word = WORD_BITS // bits
    shape = num_outputs // per_word, groups.count
    words = _read_words(checkpoint, name, shape, _in_words(part, part.outputs, per_word), groups.range)
    return _unpack(words.t(), bits).to(torch.int16) - (1 << bits - 1)


def _even_group_len(part: WeightSlice, num_groups: int) -> int:
    """Return the inputs of each group of a layer, which only the number of its groups tells.

    Raises:
        ModelLoadError: the groups cannot be equally long; any guess would give wrong numbers.
    """
    num_inputs = part.shape[1]
    if num_groups < 1 or num_inputs % num_groups:
        raise ModelLoadError(
            f"{part.name!r} has scales for {num_groups} groups, which do not divide its {num_inputs} inputs"
        )
    return num_inputs // num_groups


def _find_groups(part: WeightSlice, num_groups: int, group_len: int, stored: Tensor | None = None) -> _Groups:
    """Return the groups of a slice's inputs.

    Args:
        stored: [K of the slice], the group of each input, for checkpoints with act-order; None if adjacent inputs
            share a group.
    """
    if num_groups == 1:
        return _Groups(1, (0, 1))
    start, length = part.inputs
    index = torch.arange(start, start + length, dtype=torch.int32) // group_len
    if stored is not None and not torch.equal(stored, index):
        if stored.min() < 0 or stored.max() >= num_groups:
            lowest, highest = int(stored.min()), int(stored.max())
            raise ModelLoadError(
                f"{part.name!r} has group indices from {lowest} to {highest}, must be 0 to {num_groups - 1}"
            )
        return _Groups(num_groups, (0, num_groups), stored.int())
    first, last = start // group_len, (start + length - 1) // group_len
    needed = first, last + 1 - first
    if start % group_len == length % group_len == 0:
        return _Groups(num_groups, needed)
    return _Groups(num_groups, needed, index - first)


def _read_words(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    *ranges: Range,
    device: torch.device = CPU,
) -> Tensor:
    """Read words that pack several elements; arguments as for Checkpoint.read."""
    if checkpoint.has(name) and checkpoint.dtype_of(name) != torch.int32:
        raise ModelLoadError(f"{name!r} is stored as {checkpoint.dtype_of(name)}, expected torch.int32")
    return checkpoint.read(name, shape, *ranges, device=device)


def _in_words(part: WeightSlice, elements: Range, per_word: int) -> Range:
    """Convert a range of elements to a range of the words that pack them."""
    start, length = elements
    if start % per_word or length % per_word:
        raise ConfigError(
            f"{part.name}: a rank's slice from {start} to {start + length} is not aligned to words of {per_word} "
            "numbers; use a smaller tensor_parallel_size"
        )
    return start // per_word, length // per_word


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[A, W] int32 -> the elements of each row, lowest bits first, [A, W * 32 / bits] uint8."""
    if words.stride(-1) != 1:  # of one column, which is contiguous whatever its stride is
        words = words.clone(memory_format=torch.contiguous_format)
    elements = words.view(torch.uint8)
    return elements if bits == 8 else unpack_nibbles(elements)


def _unpack_awq(words: Tensor) -> Tensor:
    """[A, W] int32 -> [A, 8 W] uint8 in the order of the outputs."""
    places = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return _unpack(words, 4).view(*words.shape, len(AWQ_ORDER))[:, :, places].flatten(1)


def _unsigned(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, groups: _Groups) -> QuantizedWeight:
    """Return a weight from unsigned codes and zero points; codes of 4 bits are packed."""
    if bits == 4:
        return QuantizedWeight(codes.contiguous(), scales.contiguous(), zeros.contiguous(), groups.index)
    signed = (codes ^ SIGN).contiguous().view(torch.int8)
    return QuantizedWeight(signed, scales.contiguous(), _unless_zero(zeros - SIGN), groups.index)


def _powers_of_two(scales: Tensor) -> Tensor:
    """Return the values of e8m0 codes; bfloat16 holds all of them."""
    return scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def _unless_zero(zeros: Tensor | None) -> Tensor | None:
    return zeros.contiguous() if zeros is not None and zeros.any() else None


def _ignore_unused(checkpoint: Checkpoint, part: WeightSlice) -> None:
    for name in UNUSED:
        checkpoint.ignore(f"{part.name}.{name}")
