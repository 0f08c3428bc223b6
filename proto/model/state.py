"""StateTensor: memory of fixed size that a layer keeps of each sequence, not keys and values of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..options.sections import DTYPES

# A power of two that no tensor-parallel size exceeds.
_MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class StateSection:
    """Heads that stand side by side in each row of a state's tensor, of which each rank has some.

    Attributes:
        num_heads: of all ranks; ranks that are more share them, so that each has the one head of what is not divided.
        head_len: elements of a head in a row.
    """

    num_heads: int
    head_len: int


def channel_section(num_channels: int) -> StateSection:
    """Return the section of channels that each rank has adjacent ones of.

    Its heads are as long as any number of ranks allows that is a power of two up to _MAX_RANKS, times an odd divisor:
    blocks are copied in words that divide a head.
    """
    power = num_channels & -num_channels
    head_len = max(1, power // _MAX_RANKS)
    return StateSection(num_channels // head_len, head_len)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of a layer's state, of one sequence on one rank.

    Attributes:
        sections: of each row; empty if the tensor cannot be divided by heads, so that it moves between ranks of one
            tensor-parallel size only. Rows are all but the last dimension; a matrix per head is a row of all heads.
        is_recurrent: every token adds to the elements, which have `dtype`; otherwise they have the model's dtype.
        dtype: float32, or the one that the operator has chosen.
    """

    name: str
    shape: tuple[int, ...]
    sections: tuple[StateSection, ...] = ()
    is_recurrent: bool = False
    dtype: str = "float32"

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of a sequence, for a model whose elements have `dtype_bytes`."""
        return prod(self.shape) * (DTYPES[self.dtype] if self.is_recurrent else dtype_bytes)


@runtime_checkable
class KeepsState(Protocol):
    """The spec of a mixer that keeps a state of each sequence."""

    def state_tensors(self, num_ranks: int) -> tuple[StateTensor, ...]:
        """Return the tensors of a sequence's state on each of these ranks."""
        ...

    def check_ranks(self, name: str, num_ranks: int) -> None:
        """Raise ConfigError unless these ranks get equal parts; `name` is the model's."""
        ...


# The tensors of each layer with a state, in the order of the layers, on one rank.
StateLayers = tuple[tuple[StateTensor, ...], ...]


def state_bytes(layers: StateLayers, dtype_bytes: int) -> int:
    """Return the bytes of one sequence's state on one rank; 0 for a model without states."""
    return sum(tensor.num_bytes(dtype_bytes) for layer in layers for tensor in layer)


def groups_per_rank(num_groups: int, num_ranks: int) -> int:
    """Return the groups whose keys (or B and C) a rank holds; ranks that share a group each hold it."""
    return max(1, num_groups // num_ranks)


def check_heads_and_groups(
    name: str, kind: str, heads: tuple[str, int], groups: tuple[str, int], num_ranks: int
) -> None:
    """Check that ranks get equal numbers of heads, and whole groups or an equal part of one group each.

    Args:
        kind: of the layers, for the message.
        heads, groups: what they are called, and their number.

    Raises:
        ConfigError: they do not; states the numbers.
    """
    (heads_name, num_heads), (groups_name, num_groups) = heads, groups
    if num_groups < 1 or num_heads < 1 or num_heads % num_groups:
        raise ConfigError(
            f"{name}: the {num_heads} {heads_name} of its {kind} layers cannot share {num_groups} {groups_name} "
            "evenly"
        )
    if num_heads % num_ranks:
        raise ConfigError(
            f"{name}: tensor_parallel_size {num_ranks} does not divide the {num_heads} {heads_name} of its {kind} "
            "layers"
        )
    if num_groups % num_ranks and num_ranks % num_groups:
        raise ConfigError(
            f"{name}: tensor_parallel_size {num_ranks} neither divides the {num_groups} {groups_name} of its {kind} "
            "layers, nor is a multiple of them"
        )


def check_channels(name: str, kind: str, num_channels: int, num_ranks: int) -> None:
    """Raise ConfigError unless ranks get equal numbers of channels."""
    if num_channels < 1 or num_channels % num_ranks:
        raise ConfigError(
            f"{name}: tensor_parallel_size {num_ranks} does not divide the {num_channels} channels of its {kind} "
            "layers"
        )


def layers_with_state(mixers: Sequence[object]) -> list[KeepsState]:
    """Return the mixers that keep a state, in order."""
    return [mixer for mixer in mixers if isinstance(mixer, KeepsState)]
