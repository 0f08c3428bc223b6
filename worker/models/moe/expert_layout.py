"""Names and layouts of a mixture's tensors in published and in converted checkpoints.

Checkpoints store each expert's matrices under names of their own, or those of all experts as one stack. An alias
gives the matrices of a stack names of their own, so that all layouts are read alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....proto.errors import ConfigError, ModelLoadError
from ....proto.model.experts import Experts
from ....proto.model.quantization import MXFP4_GROUP_LEN
from ...comm.shard import Shard
from ...weights.checkpoint import Checkpoint
from ...weights.weight_slice import Interleaving, WeightSlice
from ..load_context import LoadContext

# Names of a layer's feed-forward block, and of the router within it.
_BLOCKS = ("block_sparse_moe", "mlp", "feed_forward", "mixer")
_ROUTERS = ("gate", "router", "gate.wg", "router.classifier")
# Biases that correct the router's scores; published under several names.
_CORRECTIONS = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "expert_bias",
    "router.e_score_correction_bias",
)
# Names of the network that every token passes.
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_UP_PROJECTIONS = ("up_proj", "gate_up_proj")
# Index of an expert in the name of a tensor of its own.
_EXPERT_INDEX = re.compile(r"\.experts\.(\d+)\.")
# Scales per block of float8 matrices.
_BLOCK_SCALES = "weight_scale_inv"
# Names of an expert's gate, up and down matrices.
_MATRICES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class ExpertSlices:
    """This rank's slices of one expert; those of `gate_up` are concatenated."""

    gate_up: list[WeightSlice]
    down: list[WeightSlice]


def find_block(checkpoint: Checkpoint, layer: str) -> tuple[str, str]:
    """Return the names of a layer's mixture and of its router.

    Raises:
        ModelLoadError: there is none under any of the known names.
    """
    for block in _BLOCKS:
        for router in _ROUTERS:
            if checkpoint.has(f"{layer}.{block}.{router}.weight"):
                return f"{layer}.{block}", f"{layer}.{block}.{router}"
    raise ModelLoadError(
        f"the checkpoint has no router of experts in {layer!r}, for example '{layer}.mlp.gate'"
    )


def find_correction(checkpoint: Checkpoint, block: str) -> str:
    """Return the name of the biases that correct the router's scores; the usual one if there are none."""
    names = [f"{block}.{own}" for own in _CORRECTIONS]
    return next((name for name in names if checkpoint.has(name)), names[0])


def find_shared(checkpoint: Checkpoint, block: str) -> str:
    """Return the name of the network that every token passes; the usual one if there is none."""
    names = [f"{block}.{own}" for own in _SHARED]
    return next(
        (name for name in names if any(checkpoint.has_layer(f"{name}.{part}") for part in _UP_PROJECTIONS)),
        names[0],
    )


def expert_slices(
    load: LoadContext, experts: Experts, hidden_size: int, block: str, own_experts: Sequence[int]
) -> list[ExpertSlices]:
    """Return this rank's slices of each of some experts, in the layout that the checkpoint has.

    Raises:
        ConfigError: the experts are quantized as a stack.
        ModelLoadError: the checkpoint has the experts in no known layout.
    """
    inner, shard = experts.intermediate_size, load.expert_shard(experts.intermediate_size)
    stack = f"{block}.experts"
    if experts.interleaved:
        return [_interleaved(load, experts, hidden_size, stack, index, shard) for index in own_experts]
    if load.checkpoint.has(f"{stack}.gate_up_proj") or load.checkpoint.has(f"{stack}.up_proj"):
        matrices = _MATRICES[0]
        _alias_stack(load.checkpoint, experts, hidden_size, stack, own_experts)
    else:
        matrices = _find_matrices(load.checkpoint, stack)
    slices = []
    for index in own_experts:
        gate, up, down = (f"{stack}.{index}.{matrix}" for matrix in matrices)
        slices.append(
            ExpertSlices(
                [
                    WeightSlice(own, (inner, hidden_size), 0, shard.start, len(shard))
                    for own in ((gate, up) if experts.gated else (up,))
                ],
                [WeightSlice(down, (hidden_size, inner), 1, shard.start, len(shard))],
            )
        )
    return slices


def read_expert_biases(
    load: LoadContext, experts: Experts, hidden_size: int, block: str, own_experts: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Read the biases of X interleaved experts: [X, 2 I], and [X, E] on the rank that adds it."""
    shard, stack = load.expert_shard(experts.intermediate_size), f"{block}.experts"
    shape, columns = (experts.count, 2 * experts.intermediate_size), (2 * shard.start, 2 * len(shard))

    def read(name: str, shape: tuple[int, int], *columns: tuple[int, int]) -> Tensor:
        rows = [load.checkpoint.read(f"{stack}.{name}", shape, (index, 1), *columns) for index in own_experts]
        return torch.cat(rows)

    gate_up = Interleaving(columns[1], columns[1]).reorder(read("gate_up_proj_bias", shape, columns), dim=1)
    down = read("down_proj_bias", (experts.count, hidden_size))
    # The ranks' results are added up.
    adds_down = load.expert_parallel or load.comm.rank == 0
    return gate_up.to(load.device, load.dtype), down.to(load.device, load.dtype) if adds_down else None


def other_experts(load: LoadContext, experts: Experts) -> list[str]:
    """Return the names of tensors of the experts that only other ranks hold."""
    own = set(load.own_experts(experts.count))
    if len(own) == experts.count:
        return []
    found = ((name, _EXPERT_INDEX.search(name)) for name in load.checkpoint.names())
    return [name for name, index in found if index is not None and int(index[1]) not in own]


def _find_matrices(checkpoint: Checkpoint, stack: str) -> tuple[str, str, str]:
    for matrices in _MATRICES:
        if checkpoint.has_layer(f"{stack}.0.{matrices[1]}"):
            return matrices
    raise ModelLoadError(
        f"the checkpoint has no experts in {stack!r}, for example '{stack}.0.{_MATRICES[0][0]}.weight'"
    )


def _alias_stack(
    checkpoint: Checkpoint, experts: Experts, hidden_size: int, stack: str, own_experts: Sequence[int]
) -> None:
    """Name each expert's matrices of ``gate_up_proj``, [X, 2 I, E], and ``down_proj``, [X, E, I].

    Transformers stores these. Gate and up may be stacks of their own. A family with `transposed` stacks has
    [X, E, 2 I] and [X, I, E]. Scales of blocks are a stack beside that of the matrices.
    """
    for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj"):
        # Of NVIDIA's Model Optimizer for Llama 4 and Step 3.5.
        if checkpoint.has(f"{stack}.{name}_weight_scale"):
            raise ConfigError(
                f"{stack!r} has quantized experts in one stack ({name}_weight_scale), which is not supported; take a "
                "checkpoint that stores each expert by itself, for example one of compressed-tensors"
            )
    inner, stored = experts.intermediate_size, checkpoint.shape_of(f"{stack}.down_proj")
    # Those of Qwen3-VL are published transposed, and not when transformers has saved them.
    transposed = experts.transposed or (stored[1:] == (inner, hidden_size) != (hidden_size, inner))
    matrices = [("down_proj", "down_proj", hidden_size, inner, 0)]
    if checkpoint.has(f"{stack}.gate_up_proj"):
        matrices += [
            (own, "gate_up_proj", 2 * inner, hidden_size, start)
            for own, start in (("gate_proj", 0), ("up_proj", inner))
        ]
    else:
        parts = ("gate_proj", "up_proj") if experts.gated else ("up_proj",)
        matrices += [(own, own, inner, hidden_size, 0) for own in parts]
    for index in own_experts:
        for name, source, num_rows, columns, start in matrices:
            length = hidden_size if name == "down_proj" else inner
            matrix = (columns, num_rows) if transposed else (num_rows, columns)
            checkpoint.alias_rows(
                f"{stack}.{index}.{name}.weight",
                f"{stack}.{source}",
                (experts.count, *matrix),
                index,
                start,
                length,
                transposed=transposed,
            )
            scales = f"{stack}.{name}_{_BLOCK_SCALES}"
            if checkpoint.has(scales):
                own, shape = f"{stack}.{index}.{name}.{_BLOCK_SCALES}", checkpoint.shape_of(scales)
                checkpoint.alias_rows(own, scales, shape, index, 0, shape[1])


def _interleaved(
    load: LoadContext, experts: Experts, hidden_size: int, stack: str, index: int, shard: Shard
) -> ExpertSlices:
    """Return the slices of an expert of gpt-oss: rows of gate and up alternate, in MXFP4 or transposed."""
    inner = experts.intermediate_size
    shapes = {"gate_up_proj": (2 * inner, hidden_size), "down_proj": (hidden_size, inner)}
    for name, (num_rows, num_columns) in shapes.items():
        own, source = f"{stack}.{index}.{name}", f"{stack}.{name}"
        if load.checkpoint.has(f"{source}_blocks"):
            num_groups = num_columns // MXFP4_GROUP_LEN
            blocks = experts.count, num_rows, num_groups, MXFP4_GROUP_LEN // 2
            load.checkpoint.alias_rows(f"{own}.weight_blocks", f"{source}_blocks", blocks, index, 0, num_rows)
            load.checkpoint.alias_rows(
                f"{own}.weight_scales", f"{source}_scales", blocks[:3], index, 0, num_rows
            )
        else:
            stored = experts.count, num_columns, num_rows
            load.checkpoint.alias_rows(f"{own}.weight", source, stored, index, 0, num_rows, transposed=True)
    length = 2 * len(shard)
    return ExpertSlices(
        [
            WeightSlice(
                f"{stack}.{index}.gate_up_proj",
                shapes["gate_up_proj"],
                0,
                2 * shard.start,
                length,
                Interleaving(length, length),
            )
        ],
        [WeightSlice(f"{stack}.{index}.down_proj", shapes["down_proj"], 1, shard.start, len(shard))],
    )
