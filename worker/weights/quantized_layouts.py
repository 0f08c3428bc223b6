"""The layouts in which checkpoints store quantised linear layers, read part by part.

- gptq (Frantar et al., 2023): ``qweight`` [K / 8, N] int32, eight numbers of neighbouring inputs, the first lowest;
  ``qzeros`` [G, N / 8], eight neighbouring outputs; ``scales`` [G, N]; ``g_idx`` [K], the group of each input.
- awq (Lin et al., 2024, in its GEMM version): ``qweight`` [K, N / 8] and ``qzeros`` [G, N / 8], eight neighbouring
  outputs in AWQ_ORDER; ``scales`` [G, N].
- compressed (compressed-tensors): ``weight_packed`` [N, K / 8] int32, or ``weight`` [N, K] int8 or float8;
  ``weight_scale`` [N, G], or one for all, or one a block; where they are needed ``weight_zero_point`` and
  ``weight_g_idx``.
- float8 (as published for DeepSeek-V3 and Qwen3): ``weight`` [N, K]; ``weight_scale_inv`` a block, or
  ``weight_scale``; either is a factor.

Which layers are left in full precision their tensors tell: such a layer has a plain ``weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.quantized_linear import FLOAT8, QuantizedWeight, pack_nibbles, unpack_nibbles
from ...proto.errors import ConfigError, ModelLoadError
from .checkpoint import Checkpoint
from .quantization import Quantization
from .weight_slice import Range, WeightSlice

# Outputs of the eight numbers of a word, the lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = 32
# What weights of 8 bits are less than their unsigned form.
SIGN = 128
# Numbers that are stored one by one.
CODE_TYPES = (torch.int8, FLOAT8)
# What a layer may store beside its weight and what computing with more exact activations has no use for.
UNUSED = ("weight_shape", "input_scale", "input_zero_point", "output_scale", "activation_scale")

Reader = Callable[[Checkpoint, WeightSlice, Quantization], QuantizedWeight | None]


def read_quantized(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization
) -> QuantizedWeight | None:
    """A part of a matrix as the checkpoint quantises it; None: it is stored in full precision.

    Raises:
        ModelLoadError: a tensor is missing or has another shape, or a group is out of range.
        ConfigError: the part begins or ends inside a word that holds several numbers.
    """
    return _READERS[quantization.method](checkpoint, part, quantization)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a part's inputs.

    Attributes:
        count: all groups of the layer.
        range: those of them that the part needs.
        index: [K] int32, the group of each of its inputs, counted from the first of these; None: runs of equal
            length.
    """

    count: int
    range: Range
    index: Tensor | None = None


def _read_gptq(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.scales"):
        return None
    num_outputs, num_inputs = part.shape
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
    )
    zeros = _read_words(
        checkpoint,
        f"{part.name}.qzeros",
        (groups.count, num_outputs // per_word),
        groups.range,
        _in_words(part, part.outputs, per_word),
    )
    checkpoint.drop_if_zero(f"{part.name}.bias")
    bytes_of_words = words.view(torch.uint8).view(*words.shape, 4)
    codes = bytes_of_words.transpose(0, 1).flatten(1)
    zeros = _unpack(zeros, quantization.bits).to(torch.int16) + quantization.zero_offset
    return _unsigned(codes, quantization.bits, scales, zeros, groups)


def _read_awq(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.scales"):
        return None
    (num_outputs, num_inputs), per_word = part.shape, len(AWQ_ORDER)
    scales, groups = _read_scales_by_group(checkpoint, part, quantization)
    outputs = _in_words(part, part.outputs, per_word)
    words = _read_words(
        checkpoint, f"{part.name}.qweight", (num_inputs, num_outputs // per_word), part.inputs, outputs
    )
    zeros = _read_words(
        checkpoint, f"{part.name}.qzeros", (groups.count, num_outputs // per_word), groups.range, outputs
    )
    codes = pack_nibbles(_unpack_awq(words).t())
    return _unsigned(codes, quantization.bits, scales, _unpack_awq(zeros).to(torch.int16), groups)


def _read_compressed(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization
) -> QuantizedWeight | None:
    if not checkpoint.has(f"{part.name}.weight_packed"):
        return _read_codes(checkpoint, part, quantization)
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
    )
    zeros = _read_zeros(checkpoint, part, groups, bits)
    _drop_unused(checkpoint, part)
    middle = 1 << bits - 1
    zeros = torch.full(scales.shape, middle, dtype=torch.int16) if zeros is None else zeros + middle
    return _unsigned(words.view(torch.uint8), bits, scales, zeros, groups)


def _read_codes(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization
) -> QuantizedWeight | None:
    """Weights of 8 bits that lie in the checkpoint as they are."""
    name = f"{part.name}.weight"
    if not checkpoint.has(name) or checkpoint.dtype_of(name) not in CODE_TYPES:
        return None
    name = f"{part.name}.weight_scale_inv"
    if not checkpoint.has(name):
        name = f"{part.name}.weight_scale"
    scales, groups = _read_scales(checkpoint, name, part, quantization.block_shape)
    codes = checkpoint.read(f"{part.name}.weight", part.shape, part.outputs, part.inputs)
    zeros = _read_zeros(checkpoint, part, groups, 8)
    _drop_unused(checkpoint, part)
    return QuantizedWeight(codes, scales, _unless_zero(zeros), groups.index)


_READERS: dict[str, Reader] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed": _read_compressed,
    "float8": _read_codes,
}


def _read_scales_by_group(
    checkpoint: Checkpoint, part: WeightSlice, quantization: Quantization, stored: Tensor | None = None
) -> tuple[Tensor, _Groups]:
    """Scales [G, N] of a part, as gptq and awq store them, and its groups; `stored` as for _find_groups."""
    num_outputs, num_inputs = part.shape
    group_len = quantization.group_len or num_inputs
    groups = _find_groups(part, -(-num_inputs // group_len), group_len, stored)
    name, shape = f"{part.name}.scales", (groups.count, num_outputs)
    return checkpoint.read(name, shape, groups.range, part.outputs), groups


def _read_scales(
    checkpoint: Checkpoint, name: str, part: WeightSlice, block_shape: tuple[int, int] | None
) -> tuple[Tensor, _Groups]:
    """Scales [G, N] of a part and its groups, whatever the scales are for: blocks, groups, outputs, or all."""
    (num_outputs, num_inputs), shape = part.shape, checkpoint.shape_of(name)
    if shape in ((), (1,)):
        scale = checkpoint.read(name, shape, *((0, 1) for _ in shape))
        return scale.reshape(1, 1).repeat(1, part.outputs[1]), _Groups(1, (0, 1))
    if shape == (num_outputs,):
        return checkpoint.read(name, shape, part.outputs).unsqueeze(0), _Groups(1, (0, 1))
    block_outputs, group_len = 1, -(-num_inputs // max(1, shape[-1]))
    if block_shape is not None and shape[0] != num_outputs:
        block_outputs, group_len = block_shape
    stored = None
    if checkpoint.has(f"{part.name}.weight_g_idx"):
        stored = checkpoint.read(f"{part.name}.weight_g_idx", (num_inputs,), part.inputs)
        # Filled with -1 where inputs were not ordered after all.
        stored = None if (stored < 0).all() else stored
    groups = _find_groups(part, -(-num_inputs // group_len), group_len, stored)
    start, length = part.outputs
    first, last = start // block_outputs, (start + length - 1) // block_outputs
    expected = -(-num_outputs // block_outputs), groups.count
    scales = checkpoint.read(name, expected, (first, last + 1 - first), groups.range)
    rows = torch.arange(start, start + length) // block_outputs - first
    return scales[rows].t().contiguous(), groups


def _read_zeros(checkpoint: Checkpoint, part: WeightSlice, groups: _Groups, bits: int) -> Tensor | None:
    """Zero points [G, N] int16 of a compressed part: stored one by one, or in words of neighbouring outputs."""
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
    return _unpack(words.t().contiguous(), bits).to(torch.int16) - (1 << bits - 1)


def _find_groups(part: WeightSlice, num_groups: int, group_len: int, stored: Tensor | None = None) -> _Groups:
    """The groups of a part's inputs.

    Args:
        stored: [K of the part], the group of each input, where the checkpoint orders inputs by their weight
            (act-order); None: neighbours share a group.
    """
    if num_groups == 1:
        return _Groups(1, (0, 1))
    start, length = part.inputs
    index = torch.arange(start, start + length, dtype=torch.int32) // group_len
    if stored is not None and not torch.equal(stored, index):
        if stored.min() < 0 or stored.max() >= num_groups:
            raise ModelLoadError(f"{part.name!r} has inputs in groups beyond its {num_groups}")
        return _Groups(num_groups, (0, num_groups), stored.int())
    first, last = start // group_len, (start + length - 1) // group_len
    needed = first, last + 1 - first
    if start % group_len == length % group_len == 0:
        return _Groups(num_groups, needed)
    return _Groups(num_groups, needed, index - first)


def _read_words(checkpoint: Checkpoint, name: str, shape: tuple[int, int], *ranges: Range) -> Tensor:
    """As checkpoint.read, of words that hold several numbers."""
    if checkpoint.has(name) and checkpoint.dtype_of(name) != torch.int32:
        raise ModelLoadError(f"{name!r} is stored as {checkpoint.dtype_of(name)}, expected torch.int32")
    return checkpoint.read(name, shape, *ranges)


def _in_words(part: WeightSlice, numbers: Range, per_word: int) -> Range:
    """A range of numbers as one of words that hold several."""
    start, length = numbers
    if start % per_word or length % per_word:
        raise ConfigError(
            f"{part.name}: a rank's part from {start} to {start + length} would cut a word of {per_word} numbers; "
            "give a smaller tensor_parallel_size"
        )
    return start // per_word, length // per_word


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[A, W] int32 -> the numbers of each row, the lowest bits first, [A, W * 32 / bits] uint8."""
    numbers = words.view(torch.uint8)
    return numbers if bits == 8 else unpack_nibbles(numbers)


def _unpack_awq(words: Tensor) -> Tensor:
    """[A, W] int32 -> [A, 8 W] uint8, by output."""
    places = torch.tensor(AWQ_ORDER).argsort()
    return _unpack(words, 4).view(*words.shape, len(AWQ_ORDER))[:, :, places].flatten(1)


def _unsigned(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, groups: _Groups) -> QuantizedWeight:
    """A weight whose codes and zero points are counted from 0; codes of 4 bits are packed."""
    if bits == 4:
        return QuantizedWeight(codes.contiguous(), scales.contiguous(), zeros.contiguous(), groups.index)
    signed = (codes ^ SIGN).contiguous().view(torch.int8)
    return QuantizedWeight(signed, scales.contiguous(), _unless_zero(zeros - SIGN), groups.index)


def _unless_zero(zeros: Tensor | None) -> Tensor | None:
    return zeros.contiguous() if zeros is not None and zeros.any() else None


def _drop_unused(checkpoint: Checkpoint, part: WeightSlice) -> None:
    for name in UNUSED:
        checkpoint.drop(f"{part.name}.{name}")
