"""KvBlocks: the blocks of one rank as bytes, all heads of them or some."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.native.memory import Addresses, copy_pieces
from ...proto.block_tables import IntArray
from ...proto.cache_groups import CacheLayout
from ...proto.kv_layout import KvLayout, StateLayout
from ...proto.kv_transfer import KvOrders, KvReport
from ..attention import LayerCache
from ..memory.cache_engine import CacheEngine
from ..memory.checksum import checksum, tensor_checksum
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .planes import Numbers, Planes

ByteArray = npt.NDArray[np.uint8]
# (first, count) of each layer of a group, by the numbers of the model's heads; a count of 0 for none.
Heads = tuple[tuple[int, int], ...]
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


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Places of a rank's blocks in a segment.

    Attributes:
        planes: of all groups, by their places in the segment, see Planes.pack.
    """

    segment: SegmentAddress
    planes: bytes


class MappedBlocks:
    """The blocks of another rank of this host, mapped into this process until the object is dropped.

    Raises:
        OSError: the rank has ended, or belongs to another user or host.
        ValueError: the map is not that of the segment.
    """

    def __init__(self, blocks: BlockMap) -> None:
        with closing(SharedSegment.open(blocks.segment)) as segment:
            _, self._content = segment.map_on_huge_pages(is_read_only=True)
        self.planes = Planes.unpack(blocks.planes)
        if not self.planes.are_within(self._content.size):
            raise ValueError(f"blocks are not within the {self._content.size} bytes of their segment")

    @property
    def address(self) -> int:
        return self._content.ctypes.data


class _Group:
    """The layers of a cache group, and where they are in memory.

    Attributes:
        planes: those of each part of each layer, one after the other, by addresses.
    """

    def __init__(self, layers: Sequence[_Layer], word_bytes: int) -> None:
        self.layers = layers
        rows, places = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for number, layer in enumerate(layers):
            for part in layer.parts:
                total, num_planes, num_heads, num_words = part.shape
                width = num_words * word_bytes
                for plane in range(num_planes):
                    start = part.data_ptr() + (layer.place * num_planes + plane) * num_heads * width
                    stride = layer.split * num_planes * num_heads * width
                    num_blocks = 1 + (total - 1 - layer.place) // layer.split
                    rows.append((start, stride, width, layer.first_head, num_heads, num_blocks))
                    places.append((number, plane, num_planes))
        self.planes = Planes(np.array(rows, np.int64).reshape(-1, Planes.NUM_FIELDS))
        self._layer, self._plane, self._num_planes = np.array(places, np.int64).reshape(-1, 3).T

    def heads_of_planes(self, heads: Heads) -> tuple[Numbers, Numbers]:
        """Return the number of each plane's first head, and how many."""
        first, count = np.array(heads, np.int64).reshape(-1, 2)[self._layer].T
        return first, count

    def pieces(self, block_ids: IntArray, heads: Heads) -> tuple[Addresses, Addresses]:
        """Return the addresses of some heads of blocks, and their lengths: [planes, blocks] each.

        Raises:
            ValueError: the rank does not have these heads or blocks.
        """
        first, count = self.heads_of_planes(heads)
        addresses = self.planes.addresses(0, block_ids, first, count)
        lengths = np.broadcast_to((count * self.planes.head_bytes)[:, None], addresses.shape)
        return addresses, lengths.astype(np.uint64)

    def places_in_content(self, lengths: Addresses) -> Addresses:
        """Return the places of pieces in bytes that have them by part: [blocks, planes of the part, heads]."""
        part_lens = self._num_planes.astype(np.uint64) * lengths.sum(axis=1, dtype=np.uint64)
        ends = np.cumsum(np.where(self._plane == 0, part_lens, 0), dtype=np.uint64)  # of each plane's part
        places = np.arange(lengths.shape[1]) * self._num_planes[:, None] + self._plane[:, None]
        found: Addresses = (ends - part_lens)[:, None] + places.astype(np.uint64) * lengths
        return found


class KvBlocks:
    """The blocks and states of one rank, by group of `KvLayout.transferred_groups`; slot s of states is number -s."""

    def __init__(
        self, cache: CacheEngine, groups: CacheLayout, layout: KvLayout, device: torch.device
    ) -> None:
        self.layout, self.num_groups = layout, len(groups.groups)
        self._device, self._segment = device, cache.segment
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_written: torch.cuda.Event | None = None
        rank, size = layout.rank, layout.tensor_parallel_size
        lengths = [_head_bytes(each) for each in (*cache.layers, *cache.draft_layers)]
        states = [tensor for layer in cache.states for tensor in layer]
        lengths += [each.unit_bytes for each in layout.states]
        self._word = next(word for word in _WORDS if all(length % word.itemsize == 0 for length in lengths))
        groups_of_layers = [
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
            groups_of_layers.append(
                [
                    _Layer(self._parts(each), shape.heads_of(rank, size).start, 1, 0)
                    for each, shape in zip(cache.draft_layers, shapes, strict=True)
                ]
            )

        self._state_group = len(groups_of_layers) if states else -1
        if states:
            groups_of_layers.append(
                [
                    section
                    for tensor, own in zip(states, layout.states, strict=True)
                    for section in self._sections(tensor, own)
                ]
            )
        self._groups = [_Group(layers, self._word.itemsize) for layers in groups_of_layers]

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
            for layer, (_, count) in zip(self._groups[group].layers, heads, strict=True)
            for part in layer.parts
        )

    @property
    def are_on_gpu(self) -> bool:
        return self._stream is not None

    @property
    def map(self) -> BlockMap | None:
        """Return the places of the blocks, for MappedBlocks of a reader; None if not all are in a segment."""
        parts = [part for group in self._groups for layer in group.layers for part in layer.parts]
        if self._segment is None or not all(map(self._segment.has, parts)):
            return None
        planes = (group.planes.pack(self._segment.start) for group in self._groups)
        return BlockMap(self._segment.address, b"".join(planes))

    @property
    def planes(self) -> Planes:
        """All groups' planes, by addresses."""
        return Planes(np.concatenate([group.planes.table for group in self._groups]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in which the blocks are, each once."""
        parts = (part for group in self._groups for layer in group.layers for part in layer.parts)
        return tuple({part.data_ptr(): part for part in parts}.values())

    def pieces(
        self, theirs: Planes, base: int, group: int, heads: Heads, sources: IntArray, targets: IntArray
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return the addresses of some heads of blocks, those of another rank's, and the lengths.

        Args:
            theirs, base: all groups' planes of the other rank, and the address of the memory that they are in.

        Raises:
            ValueError: one of the ranks does not have these heads or blocks.
        """
        own = self._groups[group]
        into, lengths = own.pieces(self._numbers(group, targets), heads)
        planes = theirs.part(sum(len(each.planes) for each in self._groups[:group]), own.planes)
        sources = self._numbers(group, sources)
        return into, planes.addresses(base, sources, *own.heads_of_planes(heads)), lengths

    def copy_from(
        self, mapped: MappedBlocks, group: int, heads: Heads, sources: IntArray, targets: IntArray
    ) -> None:
        """Copy some heads of another rank's blocks into this one's. Raises ValueError as `pieces` does."""
        pieces = self.pieces(mapped.planes, mapped.address, group, heads, sources, targets)
        copy_pieces(*pieces, bypasses_cache=True)

    def mark_written(self) -> None:
        """Note that everything launched so far is to be read by `gather`; on a CPU it is done."""
        if self._stream is not None:
            self._is_written = torch.cuda.Event()
            self._is_written.record(torch.cuda.current_stream(self._device))

    def await_written(self) -> None:
        """Wait until what was marked is written: others read the memory, or write to it, without a stream."""
        if self._is_written is not None:
            self._is_written.synchronize()

    def checksum(self, group: int, block_ids: IntArray, heads: Heads) -> int:
        """Return a checksum of what `gather` would copy, computed where the blocks are."""
        if self._stream is None:
            content = np.empty(block_ids.size * self.block_bytes(group, heads), np.uint8)
            self.gather(group, block_ids, heads, content)
            return checksum(content)
        with self._on_stream(self._stream):
            parts = [own.index_select(0, index) for own, index in self._heads(group, block_ids, heads)]
            return tensor_checksum(torch.cat([part.flatten() for part in parts]))

    def gather(self, group: int, block_ids: IntArray, heads: Heads, into: ByteArray) -> None:
        """Copy some heads of blocks into host memory of `block_bytes` each, layer by layer."""
        if self._stream is None:
            addresses, places, lengths = self._pieces(group, block_ids, heads, into)
            copy_pieces(places, addresses, lengths)
            return
        with self._on_stream(self._stream):
            for own, index, view in self._views(group, block_ids, heads, into):
                view.copy_(own.index_select(0, index))

    def scatter(self, group: int, block_ids: IntArray, heads: Heads, content: ByteArray) -> None:
        """Copy what `gather` returned, on this or another rank, into blocks."""
        if self._stream is None:
            addresses, places, lengths = self._pieces(group, block_ids, heads, content)
            copy_pieces(addresses, places, lengths, bypasses_cache=True)
            return
        with self._on_stream(self._stream):
            for own, index, view in self._views(group, block_ids, heads, content):
                own.index_copy_(0, index, view.to(self._device))

    def _pieces(
        self, group: int, block_ids: IntArray, heads: Heads, content: ByteArray
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return the addresses of heads of blocks, those of their bytes in `content`, and the lengths."""
        own = self._groups[group]
        addresses, lengths = own.pieces(self._numbers(group, block_ids), heads)
        assert lengths.sum() == content.size, "the content has the length of the heads"
        return addresses, np.uint64(content.ctypes.data) + own.places_in_content(lengths), lengths

    def _views(
        self, group: int, block_ids: IntArray, heads: Heads, content: ByteArray
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return the heads of each layer's part, the index of the blocks in it, and the place of their bytes."""
        start, whole = 0, torch.from_numpy(content).view(self._word)
        for own, index in self._heads(group, block_ids, heads):
            shape = len(index), *own.shape[1:]
            end = start + math.prod(shape)
            yield own, index, whole[start:end].view(shape)
            start = end

    def _heads(self, group: int, block_ids: IntArray, heads: Heads) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the heads of each layer's part, [N, P, heads, words], and the index of the blocks in it."""
        block_ids = self._numbers(group, block_ids)
        indices: dict[tuple[int, int], Tensor] = {}
        for layer, (first, count) in zip(self._groups[group].layers, heads, strict=True):
            if (layer.split, layer.place) not in indices:
                indices[layer.split, layer.place] = self._index(layer, block_ids)
            index = indices[layer.split, layer.place]
            for part in layer.parts if count else ():
                yield part.narrow(2, first - layer.first_head, count), index

    def _parts(self, layer: LayerCache) -> tuple[Tensor, ...]:
        """Return views [N, P, H, words] of a layer's blocks [N, P, H, B, D] and their scales [N, P, H, B]."""
        tensors = [layer.blocks.flatten(3), *([] if layer.scales is None else [layer.scales])]
        return tuple(each.view(torch.uint8).view(self._word) for each in tensors)

    def _index(self, layer: _Layer, block_ids: IntArray) -> Tensor:
        index = torch.from_numpy(block_ids.astype(np.int64) * layer.split + layer.place)
        return index.to(self._device)

    @contextmanager
    def _on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Run the body on a stream of its own, after what was marked as written, and wait for it."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            if self._is_written is not None:
                stream.wait_event(self._is_written)
            yield
            stream.synchronize()


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
