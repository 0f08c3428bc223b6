"""CacheEngine: copies and swaps preserve every byte of a block, including scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from fakes import small_config
from torch import Tensor

from quire.proto.config import EngineConfig
from quire.worker.memory.cache_engine import CacheEngine, bytes_per_block

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 7
KV_DTYPES = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


# KV heads and head dim of layers that differ; see ModelConfig.kv_layers.
UNEVEN = (2, 8), (1, 32), (2, 8)


WINDOWS = 0, 6, 0


@pytest.fixture(
    params=[
        *KV_DTYPES,
        "auto, layers that differ",
        "int8, layers that differ",
        "auto, layers that differ, windows",
        "int8, layers that differ, windows",
    ]
)
def config(request: pytest.FixtureRequest) -> EngineConfig:
    base = small_config(num_host_blocks=NUM_HOST_BLOCKS)
    kv_dtype, *differ = request.param.split(", ")
    model = replace(base.model, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    if differ:
        model = replace(model, num_layers=5, kv_layers=UNEVEN)
        if "windows" in differ:
            model = replace(model, layer_windows=WINDOWS)
    return replace(base, model=model, cache=replace(base.cache, kv_cache_dtype=kv_dtype))


@pytest.fixture
def make_engine(config: EngineConfig) -> Callable[[str], CacheEngine]:
    """`make_engine(device)`: a CacheEngine filled with random bytes."""

    def make(device: str) -> CacheEngine:
        torch.manual_seed(0)
        engine = CacheEngine(config, NUM_BLOCKS, NUM_HOST_BLOCKS, torch.bfloat16, torch.device(device))
        for part in parts(engine):
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        return engine

    return make


def parts(engine: CacheEngine) -> Iterator[Tensor]:
    """Yield the parts of each layer's blocks, as bytes."""
    for layer in engine.layers:
        yield layer.blocks.view(torch.uint8)
        if layer.scales is not None:
            yield layer.scales.view(torch.uint8)


def contents(engine: CacheEngine) -> Tensor:
    """[NUM_BLOCKS, bytes of a block in all layers]; those of places that groups share more than once."""
    return torch.cat([part.reshape(NUM_BLOCKS, -1) for part in parts(engine)], dim=1)


def test_block_has_kv_dtype_and_scales(
    config: EngineConfig, make_engine: Callable[[str], CacheEngine]
) -> None:
    engine = make_engine("cpu")
    layer = engine.layers[0]
    sizes = [(layer.blocks.shape[2], layer.blocks.shape[4]) for layer in engine.layers]
    assert sizes == list(config.model.kv_layers or [(2, 8)] * 2)
    assert layer.blocks.dtype == KV_DTYPES[config.cache.kv_cache_dtype]
    num_blocks = NUM_BLOCKS * config.cache_layout.groups[0].split
    assert layer.blocks.shape == (num_blocks, 2, 2, config.cache.block_size, config.model.head_dim)
    if config.cache.kv_cache_dtype == "auto":
        assert layer.scales is None
    else:
        assert layer.scales is not None
        assert layer.scales.dtype == torch.float32
        assert layer.scales.shape == layer.blocks.shape[:-1]


def test_bytes_per_block_equals_allocated_bytes(
    config: EngineConfig, make_engine: Callable[[str], CacheEngine]
) -> None:
    allocated = {part.data_ptr(): part.nbytes for part in parts(make_engine("cpu"))}
    assert NUM_BLOCKS * bytes_per_block(config, torch.bfloat16) == sum(allocated.values())


def test_sub_blocks_of_a_group_do_not_overlap() -> None:
    base = small_config()
    model = replace(base.model, num_layers=3, kv_layers=UNEVEN, layer_windows=WINDOWS)
    config = replace(base, model=model, cache=replace(base.cache, kv_cache_dtype="int8"))
    layout = config.cache_layout
    assert [(group.layers, group.split) for group in layout.groups] == [((0, 2), 2), ((1,), 1)]
    engine = CacheEngine(config, NUM_BLOCKS, 0, torch.float32, torch.device("cpu"))
    for layer in (engine.layers[index] for index in (0, 2)):
        sub_blocks = torch.arange(NUM_BLOCKS) * 2 + layer.group
        assert layer.scales is not None
        for part in (layer.blocks, layer.scales):
            assert not part[sub_blocks].any()
            part[sub_blocks] = 1


def test_copy_preserves_bytes(make_engine: Callable[[str], CacheEngine]) -> None:
    engine = make_engine("cpu")
    before = contents(engine)
    engine.copy(torch.tensor([[1, 3], [8, 4], [1, 2]]))
    assert torch.equal(contents(engine), before[[0, 1, 1, 1, 8, 5, 6, 7, 8]])


# Runs and single blocks, ascending and descending.
OUT = [[3, 2], [4, 3], [5, 4], [8, 6], [1, 1]]
BACK = [[2, 7], [6, 8], [3, 2], [4, 3], [1, 6]]


def test_swap_out_and_in_preserves_bytes(make_engine: Callable[[str], CacheEngine]) -> None:
    engine = make_engine("cpu")
    before = contents(engine)
    swap_there_and_back(engine)
    assert torch.equal(contents(engine), expected(before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_swaps_are_ordered_with_computation_on_gpu(make_engine: Callable[[str], CacheEngine]) -> None:
    """The host waits for nothing, so a copy that ran too early or too late would read other bytes."""
    engine = make_engine("cuda")
    before = contents(engine)
    busy = torch.randn(4096, 4096, device="cuda")
    for part in parts(engine):
        part.zero_()
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    put(engine, before)
    swap_there_and_back(engine)
    assert torch.equal(contents(engine), expected(before))


def put(engine: CacheEngine, blocks: Tensor) -> None:
    """Write blocks in the format of `contents`."""
    widths = [part.numel() // NUM_BLOCKS for part in parts(engine)]
    for part, own in zip(parts(engine), blocks.split(widths, dim=1), strict=True):
        part.copy_(own.view(part.shape))


def swap_there_and_back(engine: CacheEngine) -> None:
    engine.swap_out(torch.tensor(OUT))
    engine.wait_for_swaps()
    for part in parts(engine):
        part.zero_()
    engine.swap_in(torch.tensor(BACK))
    engine.wait_for_swaps()


def expected(before: Tensor) -> Tensor:
    host = {host_block: before[block] for block, host_block in OUT}
    after = torch.zeros_like(before)
    for host_block, block in BACK:
        after[block] = host[host_block]
    return after


def test_measure_swap_rate_is_positive(make_engine: Callable[[str], CacheEngine]) -> None:
    assert make_engine("cpu").measure_swap_rates().blocks_per_s > 0


def test_measure_swap_rate_is_zero_without_host_memory(config: EngineConfig) -> None:
    engine = CacheEngine(config, NUM_BLOCKS, 0, torch.bfloat16, torch.device("cpu"))
    assert engine.measure_swap_rates() == (0.0, 0.0)
