"""KvLayout: how a rank lays out its KV blocks, for whoever keeps or reads them.

A block that leaves its rank is good for another one only if both lay out the same tokens of the same weights alike.
Two parties compare their layouts before they exchange a block: `differences` names what differs. Those of different
tensor-parallel sizes may exchange blocks, of which each rank has some of the heads. The states of layers that keep
one of each sequence are in no block; their tensors are part of the layout. Ranks of different tensor-parallel sizes
exchange the heads of those that consist of heads; others only move between ranks of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import zip_longest
from math import gcd, prod

from .codec import FrameCodec
from .config import EngineConfig, ModelConfig
from .later_fields import sent_if_set
from .model.state import StateSection
from .options.sections import DTYPES

# A KV cache in float8 whose keys of a layer have one scale, and its values another, which are in the checkpoint.
FP8_PER_TENSOR = "fp8_per_tensor"
QUANTIZED_KV = frozenset({"fp8_e4m3", FP8_PER_TENSOR, "int8"})
_DTYPE_BYTES = DTYPES | dict.fromkeys(QUANTIZED_KV, 1)
_SCALE_BYTES = 4
_FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KvLayerShape:
    """Shape of a token's cache in a layer, on all ranks together.

    Attributes:
        num_parts: 2 for keys and values, 1 for a latent.
        num_heads: KV heads of the model; 1 for a latent, which each rank has in full.
        head_dim: numbers of a head.
        head_units: equal parts of a head of a state, which are numbered in place of heads and have `head_dim` bytes
            each; so one tensor may have heads of different lengths.
    """

    num_parts: int
    num_heads: int
    head_dim: int
    head_units: int = sent_if_set(1)

    def heads_of(self, rank: int, tensor_parallel_size: int) -> range:
        """Return the heads that a rank has, or their units; ranks that are more than the heads share them."""
        count = max(1, self.num_heads // tensor_parallel_size)
        first = rank * self.num_heads // tensor_parallel_size
        return range(first * self.head_units, (first + count) * self.head_units)


@dataclass(frozen=True, slots=True)
class KvGroupLayout:
    """One cache group.

    Attributes:
        dtype: of a cached number; one of a byte has a float32 scale for each token, part and head.
        block_tokens: tokens of a block.
        window: tokens that a token attends to; 0 for all.
        layers: in the order of the model's layers.
    """

    dtype: str
    block_tokens: int
    window: int
    layers: tuple[KvLayerShape, ...]

    def block_bytes(self, rank: int, tensor_parallel_size: int) -> int:
        """Return the bytes of a rank's part of a block."""
        scale = _SCALE_BYTES if self.dtype in QUANTIZED_KV else 0
        return self.block_tokens * sum(
            each.num_parts
            * len(each.heads_of(rank, tensor_parallel_size))
            * (each.head_dim * _DTYPE_BYTES[self.dtype] + scale)
            for each in self.layers
        )


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A tensor of a layer's state, of one sequence on one rank.

    Attributes:
        sections: see StateTensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sections: tuple[StateSection, ...] = sent_if_set(())

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """The bytes of the longest part that all heads of a row consist of; of the whole tensor without heads."""
        if not self.sections:
            return self.num_bytes
        return gcd(*(each.head_len for each in self.sections)) * _DTYPE_BYTES[self.dtype]

    def transferred(self, tensor_parallel_size: int) -> tuple[KvLayerShape, ...]:
        """Return the sections as layers of a group; the tensor without sections is a head of its rank alone."""
        if not self.sections:
            return (KvLayerShape(1, tensor_parallel_size, self.num_bytes),)
        item, unit = _DTYPE_BYTES[self.dtype], self.unit_bytes
        row = [KvLayerShape(1, each.num_heads, unit, each.head_len * item // unit) for each in self.sections]
        row_bytes = unit * sum(len(each.heads_of(0, tensor_parallel_size)) for each in row)
        return tuple(replace(each, num_parts=self.num_bytes // row_bytes) for each in row)

    def whole(self, tensor_parallel_size: int) -> StateLayout:
        """Return the tensor with the heads of all these ranks, [rows, elements of a row]."""
        num_rows = self.transferred(tensor_parallel_size)[0].num_parts
        return replace(self, shape=(num_rows, sum(each.num_heads * each.head_len for each in self.sections)))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of one rank's blocks.

    Attributes:
        model: the name that the model is served under.
        weights_version: digest of the weights; blocks of other weights are other content.
        rank, tensor_parallel_size: which heads the rank has; 0 of 1 for all of them.
        groups: the cache groups with the layers of the rank's pipeline stage, those of a draft model's layers last.
        first_layer: number of the stage's first layer among those with keys and values.
        states: the tensors of a sequence's state on the rank, in the order of the layers of its stage.
    """

    model: str
    weights_version: str
    groups: tuple[KvGroupLayout, ...]
    rank: int = 0
    tensor_parallel_size: int = 1
    first_layer: int = sent_if_set(0)
    states: tuple[StateLayout, ...] = sent_if_set(())

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of this rank's part of a block, in each group."""
        return tuple(each.block_bytes(self.rank, self.tensor_parallel_size) for each in self.groups)

    @property
    def state_bytes(self) -> int:
        """The bytes of this rank's part of a state; 0 for a model without states."""
        return sum(each.num_bytes for each in self.states)

    @property
    def transferred_groups(self) -> tuple[KvGroupLayout, ...]:
        """The groups, and one of the states if there are any, whose layers are the sections of their tensors."""
        if not self.states:
            return self.groups
        sections = [shape for each in self.states for shape in each.transferred(self.tensor_parallel_size)]
        return *self.groups, KvGroupLayout("uint8", 1, 0, tuple(sections))

    @property
    def fingerprint(self) -> bytes:
        """A digest of everything: ranks with the same one may use each other's blocks as they are."""
        return sha256(_layouts.encode(self)).digest()[:_FINGERPRINT_BYTES]

    @property
    def whole(self) -> KvLayout:
        """The layout of all heads, which ranks of all tensor-parallel sizes share; those of one size if a state has
        no heads."""
        if not all(each.sections for each in self.states):
            return replace(self, rank=0)
        states = tuple(each.whole(self.tensor_parallel_size) for each in self.states)
        return replace(self, rank=0, tensor_parallel_size=1, states=states)

    def differences(self, other: KvLayout) -> tuple[str, ...]:
        """Return each field that differs, with both values; none if the blocks are interchangeable as they are."""
        found = [
            f"{each.name} is {getattr(self, each.name)!r}, the other's {getattr(other, each.name)!r}"
            for each in fields(self)
            if each.name not in ("groups", "states") and getattr(self, each.name) != getattr(other, each.name)
        ]
        for own_state, others_state in zip_longest(self.states, other.states):
            if own_state != others_state:
                found.append(f"states have {own_state}, the other's {others_state}")
                break
        if len(self.groups) != len(other.groups):
            return *found, f"groups are {len(self.groups)}, the other's {len(other.groups)}"
        for index, (own, others) in enumerate(zip(self.groups, other.groups, strict=True)):
            found += [
                f"{each.name} of group {index} is {getattr(own, each.name)}, the other's "
                f"{getattr(others, each.name)}"
                for each in fields(own)
                if getattr(own, each.name) != getattr(others, each.name)
            ]
        return tuple(found)


def layout_of(
    config: EngineConfig,
    rank: int,
    weights_version: str,
    own_layers: range | None = None,
    states: tuple[StateLayout, ...] = (),
) -> KvLayout:
    """Return the layout of a rank's blocks.

    Args:
        rank: within the tensor-parallel group.
        weights_version: digest of the weights that the rank has loaded.
        own_layers: those of its stage, among the layers with keys and values; None for all.
        states: as of KvLayout.
    """
    model, cache = config.model, config.cache
    dtype = model.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
    shapes = _shapes_of(model)
    own = range(len(shapes)) if own_layers is None else own_layers
    groups = [
        KvGroupLayout(
            dtype,
            cache.block_size,
            group.window,
            tuple(shapes[layer] for layer in group.layers if layer in own),
        )
        for group in config.cache_layout.groups
    ]
    if (draft := config.speculative_draft) is not None and own.start == 0:
        groups.append(KvGroupLayout(dtype, cache.block_size, 0, tuple(_shapes_of(draft))))
    size = config.parallel.tensor_parallel_size
    return KvLayout(model.name, weights_version, tuple(groups), rank, size, own.start, states)


def _shapes_of(model: ModelConfig) -> list[KvLayerShape]:
    """Return how each layer with keys and values of its own caches a token on all ranks together."""
    return [KvLayerShape(*shape) for shape in model.kv_shapes(1)]


_layouts = FrameCodec("kv layout", 1, {"layout": KvLayout})
