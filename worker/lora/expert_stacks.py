"""Factors of the stacked matrices of a mixture's experts, which PEFT stores for its `target_parameters`.

The module ``<layer>.mlp.experts`` has the parameters ``gate_up_proj`` and ``down_proj``, each [X, N, K] or [X, K, N].
The factors of one of them are stored under the module's name, those of a second one under ``<module>.base_layer``:
A is [X R, F] with the rows of one expert after the other, and B is [G, R X] with the columns of one rank after the
other. F is K and G is N, or the other way round: PEFT before 0.19.1 took dimension 1 of a stored [X, N, K] for the
inputs. The shapes tell which is which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..weights.weight_slice import Range
from .adapter_config import AdapterConfig
from .adapter_tensors import AdapterTensors
from .layers import LayerFactors, LoraLayer

# Names of blocks that hold a mixture; transformers calls the first what some checkpoints call the others.
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
_ROUTERS = ("gate", "router", "gate.wg")
_ROUTER = re.compile(rf"(.+)\.({'|'.join(_BLOCKS)})\.({'|'.join(map(re.escape, _ROUTERS))})")


@dataclass(frozen=True, slots=True)
class StoredStack:
    """The stored factors of one linear layer of all experts.

    Attributes:
        module: that they are stored under.
        is_swapped: A has the outputs, and B the inputs.
    """

    module: str
    is_swapped: bool


def rename_routers(tensors: AdapterTensors, known: Collection[str]) -> None:
    """Give routers their names in the model, if PEFT stored them under transformers' names.

    Args:
        known: the modules of the model.
    """
    for module in tensors.modules.difference(known):
        if (found := _ROUTER.fullmatch(module)) is not None:
            names = [f"{found[1]}.{block}.{router}" for block in _BLOCKS for router in _ROUTERS]
            for name in [name for name in names if name in known and name not in tensors.modules][:1]:
                tensors.rename(module, name)


def find_stacks(tensors: AdapterTensors, layers: Iterable[LoraLayer]) -> dict[LoraLayer, StoredStack]:
    """Return layer |-> its stored factors, for the layers of experts whose factors are stored together.

    Raises:
        ValueError: the shapes do not tell the inputs from the outputs.
    """
    by_stack: dict[str, list[LoraLayer]] = {}
    for layer in layers:
        if layer.stack is not None:
            by_stack.setdefault(layer.stack.module, []).append(layer)
    found = {}
    for siblings in by_stack.values():
        modules = {
            layer: module
            for layer in siblings
            for module in _modules_of(layer) & tensors.modules
            if sorted(_stored_shape(tensors, module)) == sorted(layer.stacked_shape)
        }
        # A square matrix is stored as the other one of its module.
        swapped = {
            _stored_shape(tensors, module) != layer.stacked_shape
            for layer, module in modules.items()
            if len(set(layer.stacked_shape)) == 2
        }
        if modules and len(swapped) != 1:
            raise ValueError(f"the shapes of {', '.join(modules.values())} do not tell inputs from outputs")
        found.update({layer: StoredStack(module, True in swapped) for layer, module in modules.items()})
    return found


def read_stack(
    tensors: AdapterTensors, stored: StoredStack, layer: LoraLayer, config: AdapterConfig
) -> LayerFactors:
    """Return this rank's part of the factors of a layer of experts.

    Raises:
        ValueError: the shapes do not fit the model, or elements are not finite.
    """
    assert layer.stack is not None, "the layer has no experts"
    name, count = layer.stack.parameter, layer.stack.num_experts
    rank, (outputs, inputs) = config.rank_of(name), layer.stacked_shape
    first, last = (outputs, inputs) if stored.is_swapped else (inputs, outputs)
    tensors.check_shapes(stored.module, (count * rank, first), (last, count * rank))
    own = slice(layer.stack.first, layer.stack.first + layer.num_experts)
    parts = layer.parts[: len(layer.parts) // layer.num_experts]
    starts = range(0, outputs, parts[0].shape[0])
    output_ranges = [
        (start + part.outputs[0], part.outputs[1]) for start, part in zip(starts, parts, strict=True)
    ]

    def read(matrix: str, ranges: Sequence[Range]) -> Tensor:
        """Return the elements of some inputs or outputs, [X, R, length]."""
        boxes = [_read_box(tensors, stored.module, matrix, each, count, rank)[own] for each in ranges]
        return torch.cat(boxes, dim=-1)

    a = read("b" if stored.is_swapped else "a", [parts[0].inputs])
    b = read("a" if stored.is_swapped else "b", output_ranges)
    if parts[0].interleaving is not None:
        b = b[:, :, parts[0].interleaving.order(b.shape[2])]
    ranks = torch.full((layer.num_experts, len(parts)), rank, dtype=torch.int32)
    dtype = layer.factors.a.dtype
    return LayerFactors(a.unsqueeze(1).to(dtype), (b * config.scaling_of(name)).to(dtype), ranks)


def _read_box(
    tensors: AdapterTensors, module: str, matrix: str, own: Range, num_experts: int, rank: int
) -> Tensor:
    """Return a range of the features of A or B, [X, R, length]."""
    start, length = own
    if matrix == "a":
        box = tensors.read(module, "a", (0, start), (num_experts * rank, length))
        return box.view(num_experts, rank, length)
    box = tensors.read(module, "b", (start, 0), (length, num_experts * rank))
    return box.view(length, rank, num_experts).permute(2, 1, 0)


def _stored_shape(tensors: AdapterTensors, module: str) -> tuple[int, int]:
    """Return the outputs and inputs if the factors are not swapped."""
    return tensors.shape(module, "b")[0], tensors.shape(module, "a")[-1]


def _modules_of(layer: LoraLayer) -> set[str]:
    """Return the names under which PEFT may store a layer's factors."""
    assert layer.stack is not None, "the layer has no experts"
    above, _, block = layer.stack.module.removesuffix(".experts").rpartition(".")
    blocks = _BLOCKS if block in _BLOCKS else (block,)
    modules = [f"{above}.{each}.experts" for each in blocks]
    return {*modules, *(f"{module}.base_layer" for module in modules)}
