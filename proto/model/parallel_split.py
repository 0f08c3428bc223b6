"""ParallelSplit: how the ranks of a replica share a model; a rank is a coordinate in it.

Ranks are numbered by pipeline stage first and by tensor-parallel rank within a stage: the ranks that sum after every
layer are neighbors, and those that only pass hidden states on are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from ..config import ParallelConfig

T = TypeVar("T")


def own_indices(rank: int, size: int, count: int) -> range:
    """Return the indices of `count` whole things that a rank holds: adjacent ones; the first ranks hold one more."""
    base, rest = divmod(count, size)
    start = rank * base + min(rank, rest)
    return range(start, start + base + (rank < rest))


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: some adjacent layers of a model. The default is a replica's only stage, which has all.

    Attributes:
        index, count: number of the stage, from 0, and of stages.
        first, end: its layers, `end` excluded; None for the model's number.
    """

    index: int = 0
    count: int = 1
    first: int = 0
    end: int | None = None

    @property
    def is_first(self) -> bool:
        """Return whether the stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the last norm and the head, and samples."""
        return self.index == self.count - 1

    def part(self, layers: Sequence[T]) -> Sequence[T]:
        """Return what belongs to the stage's layers, of one value per layer of the model."""
        return layers[self.first : self.end]

    def __str__(self) -> str:
        if self.count == 1 or self.end is None:
            return ""
        return f"stage {self.index} of {self.count}, layers {self.first} to {self.end - 1}"


WHOLE_MODEL = Stage()


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The place of a rank.

    Attributes:
        stage: pipeline stage.
        tensor: tensor-parallel rank within the stage.
        attention: group of data-parallel attention within the stage; 0 without it.
        expert: rank that holds whole experts within the stage; 0 if each rank has a part of each expert.
    """

    stage: int
    tensor: int
    attention: int
    expert: int


@dataclass(frozen=True, slots=True)
class ParallelSplit:
    """The sizes of the groups of a replica's ranks.

    Attributes:
        pipeline: stages of layers.
        tensor: ranks that share each layer of a stage.
        data_attention: groups of adjacent ones that attend each for sequences of its own; 1 if all attend for all.
        expert: of these, ranks that hold experts whole; 1 if each rank holds a part of each expert.
        stage_sizes: layers of each stage; empty with one stage.
    """

    pipeline: int = 1
    tensor: int = 1
    data_attention: int = 1
    expert: int = 1
    stage_sizes: tuple[int, ...] = ()

    @staticmethod
    def of(parallel: ParallelConfig) -> ParallelSplit:
        """Return the split of a replica's configuration."""
        size = parallel.tensor_parallel_size
        return ParallelSplit(
            parallel.pipeline_parallel_size,
            size,
            parallel.num_kv_partitions,
            size if parallel.enable_expert_parallel else 1,
            parallel.stage_sizes,
        )

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.tensor

    @property
    def result_rank(self) -> int:
        """Return the rank whose results have the tokens: the first one of the last stage."""
        return (self.pipeline - 1) * self.tensor

    def place_of(self, rank: int) -> Coordinate:
        stage, tensor = divmod(rank, self.tensor)
        attention = tensor * self.data_attention // self.tensor
        return Coordinate(stage, tensor, attention, tensor % self.expert)

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of a stage, which are its tensor-parallel group."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    def sharers_of(self, rank: int) -> range:
        """Return the ranks that attend for the same sequences as a rank, and so share the heads of attention."""
        size = self.tensor // self.data_attention
        start = rank - rank % size
        return range(start, start + size)

    def stage(self, index: int) -> Stage:
        if self.pipeline == 1:
            return WHOLE_MODEL
        ends = list(accumulate(self.stage_sizes))
        return Stage(index, self.pipeline, ends[index] - self.stage_sizes[index], ends[index])

    def stage_of(self, rank: int) -> Stage:
        return self.stage(rank // self.tensor)

    def describe(self, rank: int) -> str:
        """Return a rank's stage for logs and errors; empty with one stage."""
        return str(self.stage_of(rank))


# Of a replica with one rank.
ONE_RANK = ParallelSplit()
