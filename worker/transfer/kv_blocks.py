"""KvBlocks: the blocks of one rank as bytes, all heads of them or some."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.cache_groups import CacheLayout
from ...proto.kv_layout import KvLayout, StateLayout
from ...proto.kv_transfer import KvOrders, KvReport
from ..attention import LayerCache
from ..memory.cache_engine import CacheEngine
from .process_memory import Addresses, OwnMemory, join_pieces

ByteArray = npt.NDArray[np.uint8]
# (first, count) of each layer of a group, by the numbers of the model's heads; a count of 0 for none.
Heads = tuple[tuple[int, int], ...]

# Numbers that tell where a part of a layer is, see KvBlocks._places.
_NUM_FIELDS = 6
# Types that blocks are copied as: of 8 bytes 30 times as fast as of one.
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of a cache group.

    Attributes:
        parts: [N, P, H, words of all tokens of a head], of numbers and of their scales if there are any.
        first_head: number of this rank's first head.
        split, place: block b of the group is sub-block ``b * split + place`` of the tensors.
    """

    parts: tuple[Tensor, ...]
    first_head: int
    split: int
    place: int


class KvBlocks:
    """The blocks and states of one rank, by group of `KvLayout.transferred_groups`; slot s of states is number -s."""

    def __init__(
        self, cache: CacheEngine, groups: CacheLayout, layout: KvLayout, device: torch.device
    ) -> None:
        self.layout, self.num_groups = layout, len(groups.groups)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_written: torch.cuda.Event | None = None
        self._memory: OwnMemory | None = None
        rank, size = layout.rank, layout.tensor_parallel_size
        lengths = [_head_bytes(each) for each in (*cache.layers, *cache.draft_layers)]
        states = [tensor for layer in cache.states for tensor in layer]
        lengths += [each.unit_bytes for each in layout.states]
        self._word = next(word for word in _WORDS if all(length % word.itemsize == 0 for length in lengths))
        self._groups = [
            [
                _Layer(
                    self._parts(cache.layers[layer]),
                    shape.heads_of(rank, size).start,
                    group.split,
                    number % group.split,
                )
                for number, (layer, shape) in enumerate(zip(group.layers, own.layers, strict=True))
            ]
            for group, own in zip(groups.groups, layout.groups, strict=False)
        ]
        if cache.draft_layers:
            shapes = layout.groups[-1].layers
            self._groups.append(
                [
                    _Layer(self._parts(each), shape.heads_of(rank, size).start, 1, 0)
                    for each, shape in zip(cache.draft_layers, shapes, strict=True)
                ]
            )

        self._state_group = len(self._groups) if states else -1
        if states:
            self._groups.append(
                [
                    section
                    for tensor, own in zip(states, layout.states, strict=True)
                    for section in self._sections(tensor, own)
                ]
            )

    def _sections(self, tensor: Tensor, own: StateLayout) -> Iterator[_Layer]:
        """Yield the sections of a state's tensor: all of them are views [N, rows, units of a row, words of a unit].

        A section begins behind those before it, so that the number of the row's first unit is less by their units.
        """
        rank, size = self.layout.rank, self.layout.tensor_parallel_size
        shapes, num_before = own.transferred(size), 0
        num_words = own.unit_bytes // self._word.itemsize
        words = tensor.view(len(tensor), -1).view(torch.uint8).view(self._word)
        units = words.view(len(tensor), shapes[0].num_parts, -1, num_words)
        for shape in shapes:
            heads = shape.heads_of(rank, size)
            yield _Layer((units,), heads.start - num_before, 1, 0)
            num_before += len(heads)

    def place_in_pull(self, group: int) -> int:
        """Return the number of a group in a pull: a draft model's layers are in the blocks of the first one."""
        if group == self._state_group:
            return self.num_groups
        return group if group < self.num_groups else 0

    def _numbers(self, group: int, block_ids: IntArray) -> IntArray:
        """Return the rows of the tensors that blocks of a group, or states, are.

        Raises:
            ValueError: a block is named among states, or a state among blocks.
        """
        numbers = -block_ids if group == self._state_group else block_ids
        if numbers.size and numbers.min() < 0:
            raise ValueError(f"group {group} has no blocks {block_ids[numbers < 0].tolist()}")
        return numbers

    def block_bytes(self, group: int, heads: Heads) -> int:
        """Return the bytes of some heads of a block."""
        return sum(
            part.shape[1] * count * part.shape[3] * self._word.itemsize
            for layer, (_, count) in zip(self._groups[group], heads, strict=True)
            for part in layer.parts
        )

    @property
    def memory(self) -> OwnMemory | None:
        """The addresses of the blocks, for `pieces` of a reader; None if they are not in this process's memory."""
        layers = [layer for layers in self._groups for layer in layers]
        if self._stream is not None or not all(
            part.is_contiguous() for each in layers for part in each.parts
        ):
            return None
        if self._memory is None:
            rows = [row for layer in layers for row in self._places(layer)]
            self._memory = OwnMemory(np.array(rows, np.int64).ravel())
        return self._memory

    def pieces(
        self, group: int, heads: Heads, sources: IntArray, targets: IntArray, places: npt.NDArray[np.int64]
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return the addresses to copy to, those to copy from in the lender's memory, and the lengths.

        Args:
            places: of the lender's `memory`.

        Raises:
            ValueError: the lender does not have these heads.
        """
        own, other = (
            iter(each.reshape(-1, _NUM_FIELDS)[self._first_row(group) :])
            for each in (self._memory_places, places)
        )
        sources, targets = self._numbers(group, sources), self._numbers(group, targets)
        found = list[tuple[Addresses, Addresses, Addresses]]()
        for layer, (first, count) in zip(self._groups[group], heads, strict=True):
            for part in layer.parts:
                width = part.shape[3] * self._word.itemsize
                here, there = next(own), next(other)
                if not count:
                    continue
                to = _starts(here, targets, first, count, part.shape[1], width)
                at = _starts(there, sources, first, count, part.shape[1], width)
                found.append((to, at, np.full(to.size, count * width, np.uint64)))
        return join_pieces(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def _first_row(self, group: int) -> int:
        return sum(len(layer.parts) for layers in self._groups[:group] for layer in layers)

    @property
    def _memory_places(self) -> npt.NDArray[np.int64]:
        assert self.memory is not None
        return self.memory.places

    @staticmethod
    def _places(layer: _Layer) -> Iterator[tuple[int, ...]]:
        """Yield where each part of a layer is: address, first head, heads, blocks, and its sub-block."""
        for part in layer.parts:
            yield part.data_ptr(), layer.first_head, part.shape[2], part.shape[0], layer.split, layer.place

    def mark_written(self) -> None:
        """Note that everything launched so far is to be read by `gather`; on a CPU it is done."""
        if self._stream is not None:
            self._is_written = torch.cuda.Event()
            self._is_written.record(torch.cuda.current_stream(self._device))

    def gather(self, group: int, block_ids: IntArray, heads: Heads, into: ByteArray) -> None:
        """Copy some heads of blocks into host memory of `block_bytes` each, layer by layer."""
        with self._on_stream():
            for own, index, view in self._views(group, block_ids, heads, into):
                if self._stream is None:
                    torch.index_select(own, 0, index, out=view)
                else:
                    view.copy_(own.index_select(0, index))

    def scatter(self, group: int, block_ids: IntArray, heads: Heads, content: ByteArray) -> None:
        """Copy what `gather` returned, on this or another rank, into blocks."""
        with self._on_stream():
            for own, index, view in self._views(group, block_ids, heads, content):
                if self._stream is None:
                    own.numpy()[index.numpy()] = (
                        view.numpy()
                    )  # PyTorch's index_copy_ takes three times as long
                else:
                    own.index_copy_(0, index, view.to(self._device))

    def _views(
        self, group: int, block_ids: IntArray, heads: Heads, content: ByteArray
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return the heads of each layer's part, the index of the blocks in it, and the place of their bytes."""
        start, whole = 0, torch.from_numpy(content).view(self._word)
        block_ids = self._numbers(group, block_ids)
        indices: dict[tuple[int, int], Tensor] = {}
        for layer, (first, count) in zip(self._groups[group], heads, strict=True):
            if (layer.split, layer.place) not in indices:
                indices[layer.split, layer.place] = self._index(layer, block_ids)
            index = indices[layer.split, layer.place]
            for part in layer.parts if count else ():
                shape = len(block_ids), part.shape[1], count, part.shape[3]
                end = start + shape[0] * shape[1] * shape[2] * shape[3]
                yield part.narrow(2, first - layer.first_head, count), index, whole[start:end].view(shape)
                start = end

    def _parts(self, layer: LayerCache) -> tuple[Tensor, ...]:
        """Return views [N, P, H, words] of a layer's blocks [N, P, H, B, D] and their scales [N, P, H, B]."""
        tensors = [layer.blocks.flatten(3), *([] if layer.scales is None else [layer.scales])]
        return tuple(each.view(torch.uint8).view(self._word) for each in tensors)

    def _index(self, layer: _Layer, block_ids: IntArray) -> Tensor:
        index = torch.from_numpy(block_ids.astype(np.int64) * layer.split + layer.place)
        return index.to(self._device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the body on a stream of its own, after what was marked as written, and wait for it."""
        if self._stream is None:
            with torch.inference_mode():
                yield
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._is_written is not None:
                self._stream.wait_event(self._is_written)
            yield
            self._stream.synchronize()


def _starts(
    place: npt.NDArray[np.int64], block_ids: IntArray, first: int, count: int, num_parts: int, width: int
) -> Addresses:
    """Return the addresses of some heads of blocks in a part of a layer, [blocks * num_parts].

    Args:
        place: of the part, see KvBlocks._places.
        width: bytes of a head.
    """
    address, first_head, num_heads, num_blocks, split, sub_block = place.tolist()
    blocks = block_ids.astype(np.int64) * split + sub_block
    if not first_head <= first <= first + count <= first_head + num_heads or blocks.max() >= num_blocks:
        raise ValueError(
            f"heads {first} to {first + count} of blocks up to {blocks.max()} are not in this memory"
        )
    starts = blocks[:, None] * num_parts + np.arange(num_parts)
    addresses: Addresses = (
        (address + (starts * num_heads + first - first_head) * width).ravel().astype(np.uint64)
    )
    return addresses


def heads_to_read(own: KvLayout, other: KvLayout, group: int, taken: Sequence[set[int]]) -> Heads:
    """Return the heads of each layer that a rank needs, another one has, and nobody was asked for yet.

    Args:
        taken: of each layer, the heads that others are asked for; changed in place.
    """
    heads = []
    for shape, others in zip(own.transferred_groups[group].layers, taken, strict=True):
        wanted = set(shape.heads_of(own.rank, own.tensor_parallel_size)) - others
        found = sorted(wanted & set(shape.heads_of(other.rank, other.tensor_parallel_size)))
        others.update(found)
        heads.append((found[0], len(found)) if found else (0, 0))
    return tuple(heads)


def _head_bytes(layer: LayerCache) -> int:
    """Return a number that divides the bytes of a head's tokens in a block, of numbers and of scales."""
    numbers = math.prod(layer.blocks.shape[3:]) * layer.blocks.itemsize
    return (
        numbers if layer.scales is None else math.gcd(numbers, layer.scales.shape[3] * layer.scales.itemsize)
    )


class NoKvService:
    """Blocks that stay where they are."""

    def apply(self, orders: KvOrders | None) -> None:
        pass

    def apply_pulls(self, orders: KvOrders | None) -> None:
        pass

    def take_reports(self, *, is_idle: bool) -> tuple[KvReport, ...]:
        return ()

    def close(self) -> None:
        pass
