"""CacheEngine: the KV cache and the states of one rank; the scheduler alone assigns its blocks and slots."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_cache import copy_blocks, swap_blocks
from ...proto.block_tables import IntArray
from ...proto.cache_groups import CacheLayout, make_layout
from ...proto.config import EngineConfig, ModelConfig, SwapRates
from ...proto.kv_layout import FP8_PER_TENSOR, StateLayout
from ...proto.model.parallel_split import WHOLE_MODEL, Stage
from ...proto.model.registry import kv_range, state_layers
from ...proto.model.state import state_bytes
from ..attention import LayerCache
from .kv_segment import KvSegment
from .pinned_memory import pinned_zeros

# Blocks moved by a measurement of the swap rate.
MEASURED_BLOCKS = 64
MEASURED_STATES = 4
# CacheConfig.kv_dtype |-> element type of the cache; "auto" is the model's dtype.
QUANTIZED_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    FP8_PER_TENSOR: torch.float8_e4m3fn,
    "int8": torch.int8,
}


class CacheEngine:
    """The paged keys and values of this rank's KV heads, or latents, and the host memory for swapped blocks.

    On a GPU, swaps run on a stream of their own, after everything launched before them. Call `wait_for_swaps` before
    launching anything that uses the cache. The host waits for neither.

    Args:
        num_blocks: on the device.
        num_host_blocks: in host memory; 0 for no host tier.
        dtype: the model's dtype.
        touches_pages: on a CPU, write the device's part now.
        segment: holds all of it, on a CPU; None for memory of this process alone.
        num_state_slots: slots of each state; None for those of the configuration.
        stage: the layers of this rank.

    Attributes:
        layers: the cache of each layer of the stage; block 0 is scratch for padding rows.
        draft_layers: of the draft model, for the same blocks.
        states: the tensors of each layer with a state, [num_state_slots, ...]; slot 0 is scratch for padding rows.
        num_blocks: on the device.
        segment: as given.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        touches_pages: bool = True,
        segment: KvSegment | None = None,
        num_state_slots: int | None = None,
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        self.num_blocks, self.segment = num_blocks, segment
        num_slots = config.cache.num_state_slots if num_state_slots is None else num_state_slots
        self.states = [
            tuple(
                _zeros(
                    (num_slots or 1, *tensor.shape),
                    getattr(torch, tensor.dtype) if tensor.is_recurrent else dtype,
                    device,
                    touches_pages=touches_pages,
                    segment=segment,
                )
                for tensor in layer
            )
            for layer in state_layers(config.model, config.parallel.tensor_parallel_size, stage)
        ]
        num_host_slots = config.cache.num_host_state_slots if num_state_slots is None else 0
        self._has_host_states = num_host_slots > 0  # a stage without such layers moves them in no time
        self._host_states = [
            tuple(
                _host_zeros((num_host_slots + 1, *tensor.shape[1:]), tensor.dtype, device, segment)
                for tensor in layer
            )
            for layer in (self.states if num_host_slots else ())
        ]
        # The parts of a block: keys and values (or latents), and their scales if they are quantized. Each tensor is
        # [P, num_blocks, elements of a place]; in host memory [P, num_host_blocks + 1, ...], block 0 unused. P is the
        # number of places in a block, which hold the layers of each cache group in turn.
        self._parts, self._host_parts = list[Tensor](), list[Tensor]()
        layers = []
        for model, layout, own_layers in _models(config, stage):
            parts = [list[Tensor]() for _ in range(layout.num_layers)]
            for part in _parts(config, model, layout, dtype, own_layers):
                shape = part.num_places, num_blocks, part.length
                stored = _zeros(shape, part.dtype, device, touches_pages=touches_pages, segment=segment)
                self._parts.append(stored)
                if num_host_blocks:
                    shape = part.num_places, num_host_blocks + 1, part.length
                    self._host_parts.append(_host_zeros(shape, part.dtype, device, segment))
                for layer, (place, block) in part.layers.items():
                    parts[layer].append(stored[place].view(-1, *block))
            groups = layout.group_of_layers()
            layers.append(
                [
                    LayerCache(own[0], own[1] if len(own) > 1 else None, groups[layer])
                    for layer, own in ((layer, parts[layer]) for layer in own_layers)
                ]
            )
        self.layers, *drafts = layers
        self.draft_layers = drafts[0] if drafts else []
        self._swap_stream: torch.cuda.Stream | None = None
        if self._host_parts and device.type == "cuda":
            self._swap_stream = torch.cuda.Stream(device)

    def copy(self, pairs: Tensor) -> None:
        """Copy blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        self.wait_for_swaps()
        for part in self._parts:
            copy_blocks(part, pairs[:, 0], pairs[:, 1])

    def copy_states(self, pairs: Tensor) -> None:
        """Copy state slots in every layer.

        Args:
            pairs: [n, 2] int64, source and destination; no slot is both.
        """
        sources, destinations = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        for layer in self.states:
            for tensor in layer:
                tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def swap_out_states(self, pairs: IntArray) -> None:
        """Copy state slots to host memory, in order with the steps.

        Args:
            pairs: [n, 2] slot, slot in host memory.
        """
        self._move_states(self.states, self._host_states, pairs)

    def swap_in_states(self, pairs: IntArray) -> None:
        """Copy states from host memory to their slots.

        Args:
            pairs: [n, 2] slot in host memory, slot.
        """
        self._move_states(self._host_states, self.states, pairs)

    def _move_states(
        self, sources: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], pairs: IntArray
    ) -> None:
        for from_layer, to_layer in zip(sources, targets, strict=True):
            for source, target in zip(from_layer, to_layer, strict=True):
                for first, second in pairs.tolist():
                    target[second].copy_(source[first], non_blocking=True)

    def swap_out(self, pairs: Tensor) -> None:
        """Copy device blocks to host memory, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, device block and host block.
        """
        with self._on_swap_stream():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(part, host_part, pairs)

    def swap_in(self, pairs: Tensor) -> None:
        """Copy host blocks to the device, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, host block and device block.
        """
        with self._on_swap_stream():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(host_part, part, pairs)

    @property
    def host_parts(self) -> list[Tensor]:
        """Return the tensors of the host memory, [places, num_host_blocks + 1, length]; empty without any."""
        return self._host_parts

    @property
    def host_states(self) -> list[Tensor]:
        """Return the tensors of the states in host memory, [slots + 1, ...], layer by layer; empty without any."""
        return [tensor for layer in self._host_states for tensor in layer]

    def swaps_so_far(self) -> Callable[[], None]:
        """Return a function that waits on the host until the swaps launched so far are done."""
        streams = list[torch.cuda.Stream]()
        if self._swap_stream is not None:
            streams.append(self._swap_stream)
        if self._host_states and self._host_states[0][0].is_pinned():
            streams.append(
                torch.cuda.current_stream(self.states[0][0].device)
            )  # states move beside the steps
        events = [stream.record_event() for stream in streams]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def wait_for_swaps(self) -> None:
        """Make later launches on the current stream wait for the swaps, which read blocks that a step may write."""
        if self._swap_stream is not None:
            torch.cuda.current_stream(self._swap_stream.device).wait_stream(self._swap_stream)

    def measure_swap_rates(self) -> SwapRates:
        """Measure the moves to host memory and back, which write the host memory and the slots of states."""
        return SwapRates(self._measure_blocks(), self._measure_states())

    def _measure_states(self) -> float:
        if not self._host_states:
            return 0.0 if self.states or not self._has_host_states else math.inf
        count = min(len(self.states[0][0]), len(self._host_states[0][0]), MEASURED_STATES + 1) - 1
        if count < 1:
            return 0.0
        pairs = np.arange(1, count + 1, dtype=np.int32).repeat(2).reshape(-1, 2)
        self.swap_out_states(pairs)  # touches the pages of the host memory for the first time
        self._synchronize_steps()
        started = time.perf_counter()
        self.swap_out_states(pairs)
        self.swap_in_states(pairs)
        self._synchronize_steps()
        return 2 * count / (time.perf_counter() - started)

    def _synchronize_steps(self) -> None:
        device = self.states[0][0].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _measure_blocks(self) -> float:
        if not self._host_parts:
            return 0.0
        count = min(self._parts[0].shape[1], self._host_parts[0].shape[1], MEASURED_BLOCKS + 1) - 1
        if count < 1:
            return 0.0
        # Scattered, as blocks of sequences are after a while; a GPU compiles its kernel for these here.
        pairs = torch.stack((torch.arange(1, count + 1), torch.arange(count, 0, -1)), dim=1)
        self.swap_out(pairs)  # touches the pages of the host memory for the first time
        self._synchronize()
        started = time.perf_counter()
        self.swap_out(pairs)
        self.swap_in(pairs)
        self._synchronize()
        return 2 * count / (time.perf_counter() - started)

    @contextmanager
    def _on_swap_stream(self) -> Iterator[None]:
        """Run the body on the swap stream, after everything launched so far; on a CPU run it directly."""
        if self._swap_stream is None:
            yield
            return
        self._swap_stream.wait_stream(torch.cuda.current_stream(self._swap_stream.device))
        with torch.cuda.stream(self._swap_stream):
            yield

    def _synchronize(self) -> None:
        if self._swap_stream is not None:
            self._swap_stream.synchronize()


def bytes_per_block(config: EngineConfig, dtype: torch.dtype, stage: Stage = WHOLE_MODEL) -> int:
    """Return the KV bytes of a block on one rank, in all its layers, for a model of `dtype`."""
    return sum(
        part.num_places * part.length * part.dtype.itemsize
        for model, layout, own_layers in _models(config, stage)
        for part in _parts(config, model, layout, dtype, own_layers)
    )


def bytes_per_state(config: EngineConfig, dtype: torch.dtype, stage: Stage = WHOLE_MODEL) -> int:
    """Return the bytes of a state slot on one rank, in all its layers; 0 for a model without states."""
    layers = state_layers(config.model, config.parallel.tensor_parallel_size, stage)
    return state_bytes(layers, dtype.itemsize)


def state_layouts(config: EngineConfig, stage: Stage = WHOLE_MODEL) -> tuple[StateLayout, ...]:
    """Return the tensors of a state on one rank, in the order of its layers; empty for a model without states."""
    return tuple(
        StateLayout(
            each.name, each.shape, each.dtype if each.is_recurrent else config.model.dtype, each.sections
        )
        for layer in state_layers(config.model, config.parallel.tensor_parallel_size, stage)
        for each in layer
    )


def _models(config: EngineConfig, stage: Stage) -> list[tuple[ModelConfig, CacheLayout, range]]:
    """Return the models whose keys and values a block has, and their layers on this rank.

    These are the target, and a draft model if there is one, which the first stage has. The draft model's layers are
    in the blocks of the first cache group.
    """
    models, draft = (
        [(config.model, config.cache_layout, kv_range(config.model, stage))],
        config.speculative_draft,
    )
    if draft is not None and stage.is_first:
        layout = make_layout(draft.num_kv_layers, (), draft.max_model_len, 0)
        models.append((draft, layout, kv_range(draft, WHOLE_MODEL)))
    return models


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of all blocks, [num_places, num_blocks, length].

    Attributes:
        length: elements of a place.
        layers: layer |-> its place, and the shape of its block.
    """

    num_places: int
    length: int
    dtype: torch.dtype
    layers: dict[int, tuple[int, tuple[int, ...]]]


def _parts(
    config: EngineConfig, model: ModelConfig, layout: CacheLayout, dtype: torch.dtype, own_layers: range
) -> list[_Part]:
    """Return the tensors of a model's blocks: first those of keys and values, then those of scales.

    All groups share the places for keys and values. With one group, layers of each shape have places of their own,
    as all scales have: layers of one size may differ in heads, of each of which a token has a scale.

    Args:
        own_layers: the layers of this rank's stage.
    """
    shapes = model.kv_shapes(config.parallel.tensor_parallel_size)
    by_shape = {
        heads: [layer for layer in own_layers if shapes[layer] == heads]
        for heads in dict.fromkeys(shapes[layer] for layer in own_layers)
    }
    alike = list(by_shape.values())
    block_size, quantized = config.cache.block_size, QUANTIZED_DTYPES.get(config.cache.kv_cache_dtype)
    blocks = [(parts, heads, block_size, dim) for parts, heads, dim in shapes]
    shared = alike if len(layout.groups) == 1 else [list(own_layers)]
    found = [_make_part(layout, layers, blocks, quantized or dtype) for layers in shared]
    if quantized is not None:
        scales = [block[:3] for block in blocks]
        found += [_make_part(layout, layers, scales, torch.float32) for layers in alike]
    return found


def _make_part(
    layout: CacheLayout, layers: Sequence[int], blocks: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> _Part:
    """Return the tensor for some layers.

    Args:
        blocks: shape of a block in each layer of the model.
    """
    places, length, wanted = dict[int, tuple[int, tuple[int, ...]]](), 0, frozenset(layers)
    for group in layout.groups:
        used = dict[int, int]()  # place of the group |-> place in this tensor
        for number, layer in enumerate(group.layers):
            if layer in wanted:
                place = used.setdefault(number // group.split, len(used))
                places[layer] = place, blocks[layer]
                length = max(length, group.split * math.prod(blocks[layer]))
    num_places = 1 + max(place for place, _ in places.values())
    return _Part(num_places, length, dtype, places)


def _host_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, segment: KvSegment | None
) -> Tensor:
    """Return zeros in host memory, pinned if the device is a GPU; of an inherited segment what it has."""
    if device.type == "cpu":
        return _zeros(shape, dtype, device, segment=segment)
    return pinned_zeros(shape, dtype)


def _zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    touches_pages: bool = True,
    segment: KvSegment | None = None,
) -> Tensor:
    """Return zeros; of an inherited segment what it has."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if segment is not None:
        part = segment.take(shape, dtype)
        return part.zero_() if touches_pages and not segment.is_inherited else part
    # numpy allocates on huge pages if the system has some. The pages are touched here, not by the first steps: the
    # first touch took a ninth of a prompt's time, and missing memory is better found now.
    num_bytes = math.prod(shape) * dtype.itemsize
    if not touches_pages:
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).zero_().view(dtype).view(shape)
