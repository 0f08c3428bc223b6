"""Replicas whose ranks lend blocks and read them, with content that tells where it is from."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from fakes import small_config

from quire.proto.config import EngineConfig
from quire.proto.kv_layout import StateLayout, layout_of
from quire.proto.kv_transfer import KvGrant, KvOrders, KvPull, KvReport, KvReportKind
from quire.proto.model.state import StateSection
from quire.proto.transport.network import CurveKeys
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.memory.kv_segment import KvSegment
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.service import KvService

NUM_BLOCKS, NUM_SLOTS, SEGMENT_BYTES = 12, 5, 1 << 20

SOURCES = np.array([3, 7, 5, 9], np.int32)

TARGETS = np.array([1, 2, 4, 8], np.int32)

CPU = torch.device("cpu")


def make_config(size: int, *, windows: tuple[int, ...] = (0, 0, 0), dtype: str = "auto") -> EngineConfig:
    config = small_config(layer_windows=windows, num_blocks=NUM_BLOCKS)
    model = replace(config.model, num_kv_heads=4, num_heads=4, head_dim=8)
    cache = replace(config.cache, kv_cache_dtype=dtype)
    return replace(
        config, model=model, cache=cache, parallel=replace(config.parallel, tensor_parallel_size=size)
    )


def state_of(cache: CacheEngine, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros in the segment of a cache."""
    assert cache.segment is not None
    return cache.segment.take(shape, torch.float32)


class Replica:
    """The caches of a replica's ranks, with content that names layer, part, head, block and token."""

    def __init__(self, config: EngineConfig, *, is_empty: bool = False, has_states: bool = False) -> None:
        self.config, self.size = config, config.parallel.tensor_parallel_size
        self.states: tuple[StateLayout, ...] = ()
        self.caches = [
            CacheEngine(config, NUM_BLOCKS, 0, torch.float32, CPU, segment=KvSegment.create(SEGMENT_BYTES))
            for _ in range(self.size)
        ]
        if not is_empty:
            for rank, cache in enumerate(self.caches):
                for layer, each in enumerate(cache.layers):
                    for tensor in (each.blocks, *([] if each.scales is None else [each.scales])):
                        tensor.copy_(self._content(tensor, layer, rank))

        if has_states:
            shapes = (3, 24 // self.size), (7,)
            self.states = tuple(StateLayout(str(shape), shape, "float32") for shape in shapes)
            for rank, cache in enumerate(self.caches):
                cache.states = [(state_of(cache, (NUM_SLOTS, *shape)),) for shape in shapes]
                for (tensor,) in () if is_empty else cache.states:
                    tensor.copy_(torch.rand(tensor.shape) + rank)

    def _content(self, tensor: torch.Tensor, layer: int, rank: int) -> torch.Tensor:
        shape = (*tensor.shape[:2], tensor.shape[2] * self.size, *tensor.shape[3:])
        whole = (torch.arange(int(np.prod(shape))).reshape(shape) * 7 + layer) % 113
        return whole.narrow(2, rank * tensor.shape[2], tensor.shape[2]).to(tensor.dtype)

    def services(
        self, stack: ExitStack, directory: Path, keys: CurveKeys | None = None, *, has_nixl: bool = False
    ) -> list[KvService]:
        found = []
        for rank, cache in enumerate(self.caches):
            layout = layout_of(self.config, rank, "w", states=self.states)
            blocks = KvBlocks(cache, self.config.cache_layout, layout, CPU)
            endpoint = f"ipc://{directory}/{id(self)}-{rank}.kv" if keys is None else "tcp://127.0.0.1:*"
            found.append(KvService(blocks, "w", endpoint, keys, lambda body: body(), has_nixl=has_nixl))
            stack.callback(found[-1].close)
        return found


def await_report(service: KvService, kind: KvReportKind) -> KvReport:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for report in service.take_reports(is_idle=True):
            if report.kind is kind:
                return report
    raise AssertionError(f"no report {kind}")


def pull_of(endpoints: tuple[str, ...], counts: tuple[int, ...] = (4,), timeout_s: float = 60.0) -> KvOrders:
    order = KvPull(1, 1, endpoints, np.array(counts, np.int32), SOURCES, TARGETS, timeout_s)
    return KvOrders(pulls=(order,))


GRANT = KvOrders(grants=(KvGrant(1, SOURCES),))


def travel(
    stack: ExitStack, source: Replica, target: Replica, directory: Path, keys: CurveKeys | None = None,
    counts: tuple[int, ...] = (4,), before: Callable[[], None] = lambda: None, *, has_nixl: bool = False,
) -> list[KvReport]:  # fmt: skip
    lending, reading = (each.services(stack, directory, keys, has_nixl=has_nixl) for each in (source, target))
    endpoints = tuple(await_report(each, KvReportKind.SERVES).name for each in lending)
    for each in lending:
        each.apply(GRANT)
    before()
    for each in reading:
        each.apply_pulls(pull_of(endpoints, counts))
    return [await_report(each, KvReportKind.PULLED) for each in reading]


def assert_arrived(source: Replica, target: Replica, layers: range = range(3)) -> None:
    """Check that the targets have the content of the sources, in all heads."""
    for layer in layers:
        for kind in ("blocks", "scales"):
            owned = [getattr(cache.layers[layer], kind) for cache in source.caches]
            taken = [getattr(cache.layers[layer], kind) for cache in target.caches]
            if owned[0] is None:
                continue
            whole, found = torch.cat(owned, 2), torch.cat(taken, 2)
            assert torch.equal(found[TARGETS.tolist()], whole[SOURCES.tolist()])
            others = [block for block in range(NUM_BLOCKS) if block not in TARGETS]
            assert not found[others].to(torch.float32).any(), "a block changed that nobody pulled"


def state_pull(endpoints: tuple[str, ...], source: int = -2) -> KvOrders:
    """Order three blocks and the state in slot 3."""
    sources, targets = np.append(SOURCES[:3], source), np.append(TARGETS[:3], -3)
    counts = np.array([3, 1], np.int32)
    order = KvPull(1, 1, endpoints, counts, sources.astype(np.int32), targets.astype(np.int32), 60.0)
    return KvOrders(pulls=(order,))


def move_state(
    stack: ExitStack,
    source: Replica,
    target: Replica,
    directory: Path,
    keys: CurveKeys | None = None,
    slot: int = -2,
    *,
    has_nixl: bool = False,
) -> list[KvReport]:
    """Lend three blocks and the state in slot 2, and read them; return what the readers report."""
    lending, reading = (each.services(stack, directory, keys, has_nixl=has_nixl) for each in (source, target))
    serving = [await_report(each, KvReportKind.SERVES) for each in lending]
    own_bytes = sum(each[0].numel() * 4 for (each,) in source.caches[0].states)
    assert [each.num_bytes for each in serving] == [own_bytes] * source.size
    for each in lending:
        each.apply(KvOrders(grants=(KvGrant(1, np.append(SOURCES[:3], -2).astype(np.int32)),)))
    for each in reading:
        each.apply_pulls(state_pull(tuple(report.name for report in serving), slot))
    return [await_report(each, KvReportKind.PULLED) for each in reading]


# Inputs of a convolution, [3, two sections of 2 heads of 4 and one of 8 heads of 6], and a matrix per head.
SECTIONS = (StateSection(2, 4), StateSection(2, 4), StateSection(8, 6)), (StateSection(8, 15),)


def states_of(rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """Return a rank's part of the same state: [3, elements of its heads], [its heads, 3, 5]."""
    first, heads = rank * 8 // size, 8 // size
    group = rank * 2 // size
    groups = slice(group, group + max(1, 2 // size))
    queries, keys = torch.arange(48.0).view(2, 3, 2, 4)
    values, matrices = torch.arange(48.0, 192.0).view(3, 8, 6), torch.arange(120.0).view(8, 3, 5)
    row = [queries[:, groups], keys[:, groups], values[:, first : first + heads]]
    return torch.cat([each.flatten(1) for each in row], 1), matrices[first : first + heads]


def replica_with_heads(size: int, *, is_empty: bool) -> Replica:
    """Return a replica whose ranks have the state in slot 2."""
    replica = Replica(make_config(size), is_empty=is_empty)
    parts = states_of(0, size)
    names_and_sections = zip(("conv", "recurrent"), parts, SECTIONS, strict=True)
    replica.states = tuple(
        StateLayout(name, tuple(part.shape), "float32", sections)
        for name, part, sections in names_and_sections
    )
    for rank, cache in enumerate(replica.caches):
        cache.states = [(state_of(cache, (NUM_SLOTS, *part.shape)),) for part in parts]
        for (tensor,), part in zip(cache.states, states_of(rank, size), strict=True):
            tensor[2] = 0 if is_empty else part
    return replica


def await_pull(reading: KvService, endpoint: str) -> str:
    """Pull the blocks, and return why they have not come."""
    reading.apply_pulls(pull_of((endpoint,)))
    return await_report(reading, KvReportKind.PULLED).name
