"""Sums over ranks by FlashInfer, through a package with its recorded signatures that sums by definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed
from fake_flashinfer import FakeFlashInfer
from torch import Tensor

from quire.kernels.norm import add_rms_norm
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.worker.comm import all_reduce_choice, symmetric_memory
from quire.worker.comm.symmetric_memory import MAX_BYTES
from quire.worker.comm.torch_distributed import TorchDistributed
from quire.worker.libraries import installed
from quire.worker.libraries.all_reduce_backend import (
    FlashInferSum,
    FlashInferSums,
    OwnSums,
    StoreBackend,
    choose_sums,
)

HIDDEN_SIZE, GPU = 64, torch.device("cuda", 0)
HashStore: Any = torch.distributed.HashStore  # type: ignore[attr-defined]


class Comm(TorchDistributed):
    """One of several ranks that have a store only."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.store = rank, size, store

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor + rank for rank in range(self.size)])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def on_ranks(size: int, function: Any) -> list[Any]:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(Comm(rank, size, store)), range(size)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sum_is_added_and_normalized_on_every_rank(dtype: torch.dtype) -> None:
    parts = torch.randn(2, 5, HIDDEN_SIZE).to(dtype)
    residual, weight = torch.randn(5, HIDDEN_SIZE).to(dtype), torch.rand(HIDDEN_SIZE).to(dtype)

    def on_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        own = residual.clone()
        fused = FlashInferSum(FakeFlashInfer().comm, comm, HIDDEN_SIZE, dtype)
        assert fused.max_tokens == MAX_BYTES // (2 * HIDDEN_SIZE)
        return fused.add_rms_norm(parts[comm.rank], own, weight, 1e-5), own

    expected_residual = residual.clone()
    expected = add_rms_norm(parts.float().sum(0).to(dtype), expected_residual, weight, 1e-5)
    for found, own in on_ranks(2, on_rank):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(own, expected_residual, atol=2e-2, rtol=2e-2)


def test_ranks_exchange_handles_by_the_store() -> None:
    def on_rank(comm: Comm) -> Any:
        backend = StoreBackend(comm)
        backend.barrier()
        gathered = backend.allgather((comm.rank, b"handle"))
        return (
            backend.Get_rank(),
            backend.Get_size(),
            gathered,
            backend.bcast(comm.rank, 1),
            backend.Split(0, 0),
        )

    for rank, found in enumerate(on_ranks(3, on_rank)):
        assert found[:4] == (rank, 3, tuple((other, b"handle") for other in range(3)), 1)
        assert found[4].Get_rank() == rank


def test_ranks_exchange_no_objects() -> None:
    def on_rank(comm: Comm) -> None:
        with pytest.raises(TypeError):
            StoreBackend(comm).allgather(torch.float16)

    on_ranks(2, on_rank)


def test_sums_are_opened_for_as_many_tokens_as_they_are_faster_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank counts; here NCCL is as fast from 4 tokens on."""
    times = iter([1.0, 9.0, 1.0, 9.0, 9.0, 1.0])
    monkeypatch.setattr(all_reduce_choice, "_seconds", lambda op: next(times, 1.0))
    monkeypatch.setattr(symmetric_memory, "host_id", lambda: 7)
    monkeypatch.setattr(Comm, "all_gather", lambda self, tensor: tensor.unsqueeze(0))
    device = torch.device("cpu", 0)
    fused = FlashInferSums(FakeFlashInfer().comm).open(
        Comm(0, 1, HashStore()), HIDDEN_SIZE, torch.bfloat16, device
    )
    assert fused.max_tokens == 2


@pytest.fixture
def config(make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    fake = FakeFlashInfer()
    monkeypatch.setattr(FlashInferSums, "load", classmethod(lambda cls, device: cls(fake.comm)))
    monkeypatch.setattr(installed.Library, "version", "0.6.18")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made: EngineConfig = engine_config(make_model("llama"), 2, device="cuda", dtype="bfloat16")
    parallel = replace(made.parallel, fused_all_reduce=True, all_reduce_backend="flashinfer")
    return replace(made, parallel=parallel)


def with_parallel(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, parallel=replace(config.parallel, **changes))


def test_named_library_is_chosen(config: EngineConfig) -> None:
    assert isinstance(choose_sums(config, GPU), FlashInferSums)
    assert isinstance(choose_sums(with_parallel(config, all_reduce_backend="auto"), GPU), FlashInferSums)
    assert isinstance(choose_sums(with_parallel(config, all_reduce_backend="triton"), GPU), OwnSums)
    assert choose_sums(with_parallel(config, fused_all_reduce=False), GPU) is None


@pytest.mark.parametrize(
    ("changes", "capability", "problem"),
    [
        ({"tensor_parallel_size": 3}, (9, 0), "there are 3 ranks, it supports 2, 4, 8"),
        ({}, (8, 0), "the GPU has compute capability 8.0"),
    ],
)
def test_library_that_does_not_fit_is_refused_by_name_and_passed_by_auto(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    capability: tuple[int, int],
    problem: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    changed = with_parallel(config, **changes)
    with pytest.raises(ConfigError, match=f"FlashInfer cannot be used: {problem}"):
        choose_sums(changed, GPU)
    assert isinstance(choose_sums(with_parallel(changed, all_reduce_backend="auto"), GPU), OwnSums)
