"""KvLayout: equal layouts share names, and each difference is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import small_config

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.kv_layout import KvGroupLayout, KvLayerShape, KvLayout, layout_of
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.model.registry import kv_range

GROUP = KvGroupLayout("bfloat16", 16, 0, (KvLayerShape(2, 8, 64),) * 4)
LAYOUT = KvLayout("m", "w1", (GROUP,), rank=1, tensor_parallel_size=4)


def test_layout_names_each_field_that_differs() -> None:
    assert LAYOUT.differences(LAYOUT) == ()
    other = replace(LAYOUT, weights_version="w2", groups=(replace(GROUP, block_tokens=32),))
    assert LAYOUT.differences(other) == (
        "weights_version is 'w1', the other's 'w2'",
        "block_tokens of group 0 is 16, the other's 32",
    )
    assert LAYOUT.differences(replace(LAYOUT, groups=())) == ("groups are 1, the other's 0",)


def test_layout_of_ranks_of_other_sizes_is_whole_the_same() -> None:
    other = replace(LAYOUT, rank=0, tensor_parallel_size=2)
    assert other.fingerprint != LAYOUT.fingerprint
    assert other.whole.fingerprint == LAYOUT.whole.fingerprint
    assert LAYOUT.block_bytes == (16 * 4 * 2 * 2 * 64 * 2,)
    assert other.block_bytes == (2 * LAYOUT.block_bytes[0],)


@pytest.mark.parametrize(("size", "heads"), [(1, [range(4)]), (2, [range(2), range(2, 4)])])
def test_heads_are_shared_out_among_ranks(size: int, heads: list[range]) -> None:
    shape = KvLayerShape(2, 4, 8)
    assert [shape.heads_of(rank, size) for rank in range(size)] == heads


def test_heads_fewer_than_ranks_are_shared() -> None:
    shape = KvLayerShape(2, 2, 8)
    assert [shape.heads_of(rank, 4) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]


def test_block_of_quantized_numbers_has_scales() -> None:
    group = KvGroupLayout("int8", 16, 0, (KvLayerShape(2, 8, 64),))
    assert group.block_bytes(0, 1) == 16 * 2 * 8 * (64 + 4)


def test_fingerprint_depends_on_all_that_determines_the_bytes() -> None:
    layouts = (
        LAYOUT,
        replace(LAYOUT, weights_version="w2"),
        replace(LAYOUT, rank=2),
        replace(LAYOUT, first_layer=4),
        layout_of(small_config(), 0, "w"),
    )
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)


def test_rank_of_a_stage_has_the_layers_of_the_stage() -> None:
    options = EngineOptions(
        "demo", pipeline_parallel_size=2, tensor_parallel_size=2, kv_disk="/nowhere:64MiB"
    )
    config = resolve(options, Machine(num_cores=2, num_gpus=0))
    split = ParallelSplit.of(config.parallel)
    found = [
        layout_of(config, split.place_of(rank).tensor, "w", kv_range(config.model, split.stage_of(rank)))
        for rank in range(split.num_ranks)
    ]
    assert [layout.rank for layout in found] == [0, 1, 0, 1]
    sizes = config.parallel.stage_sizes
    assert [len(layout.groups[0].layers) for layout in found[::2]] == [*sizes]
    assert [layout.first_layer for layout in found[::2]] == [0, sizes[0]]
