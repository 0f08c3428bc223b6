"""Page-locked memory is allocated once, in place, and unlocked when its tensor is gone."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import small_config

from quire.worker.comm.communicator import SingleRank
from quire.worker.memory import cache_engine
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.memory.pinned_memory import pinned_zeros
from quire.worker.rank.runner import ModelRunner


class Cudart:
    """Stands in for CUDA's runtime: keeps which ranges are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_pinned_zeros_locks_its_own_bytes_until_freed(cudart: Cudart) -> None:
    tensor = pinned_zeros((3, 5, 7), torch.bfloat16)
    assert not tensor.any()
    assert cudart.locked == {tensor.data_ptr(): 2 * 3 * 5 * 7}
    part = tensor[1]
    del tensor
    gc.collect()
    assert len(cudart.locked) == 1
    part.fill_(1)
    del part
    gc.collect()
    assert cudart.locked == {}


def test_memory_that_cannot_be_locked_is_named(cudart: Cudart) -> None:
    cudart.status = 2
    with pytest.raises(MemoryError, match="cannot lock 24 bytes of host memory: CUDA error 2"):
        pinned_zeros((2, 3), torch.float32)


def test_host_tier_of_a_gpu_is_allocated_in_pinned_memory(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are locked where they were allocated: a copy would need the memory twice."""
    config = small_config()
    monkeypatch.setattr(
        cache_engine, "_zeros", lambda shape, dtype, device, **_: torch.zeros(shape, dtype=dtype)
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    engine = CacheEngine(config, 4, 6, torch.float32, torch.device("cuda", 0))
    (part,) = engine._host_parts
    assert cudart.locked == {part.data_ptr(): part.nbytes}
    assert part.shape[1] == 6 + 1


def test_profile_run_allocates_no_host_tier(make_model: Any, engine_config: Any) -> None:
    config = engine_config(make_model("llama"), block_size=4, max_num_seqs=4, max_model_len=64)
    config = replace(config, cache=replace(config.cache, num_host_kv_blocks=1 << 40))
    runner = ModelRunner(config, SingleRank())
    runner.memory.run_largest_steps()  # a petabyte could not be allocated
