"""open_symmetric_memory with a stand-in for torch's allocator that resolves the group as the real one does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from quire.kernels.all_reduce_norm import NUM_SIGNALS
from quire.proto.errors import ConfigError
from quire.worker.comm import symmetric_memory
from quire.worker.comm.symmetric_memory import MAX_BYTES, open_symmetric_memory
from quire.worker.comm.torch_distributed import TorchDistributed

HIDDEN_SIZE = 96
DEVICE = torch.device("cpu", 0)

c10d: Any = torch._C._distributed_c10d
HashStore: Any = torch.distributed.HashStore  # type: ignore[attr-defined]


class Comm(TorchDistributed):
    """Rank 1 of two ranks whose GPUs have the given indices."""

    def __init__(self, indices: tuple[int, int] = (0, 1), hosts: tuple[int, int] = (7, 7)) -> None:
        self.rank, self.size = 1, 2
        self.store = HashStore()
        self._places = torch.tensor(list(zip(hosts, indices, strict=True)))

    def all_gather(self, tensor: Tensor) -> Tensor:
        assert tensor.shape == self._places[0].shape
        return self._places

    def barrier(self) -> None: ...

    def meet(self, timeout_s: float) -> None: ...


class Handle:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return memory of a rank, `offset` elements from its start; a copy, which does not keep the memory."""
        num = torch.Size(shape).numel()
        return self._memory.view(dtype)[offset : offset + num].view(shape).clone()


class SymmetricMemory:
    """Resolves the group by its name, as torch's CUDASymmetricMemoryAllocator does from 2.11 on."""

    groups: list[tuple[int, int]]
    handle: Any

    @classmethod
    def empty_strided_p2p(
        cls, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device, name: str
    ) -> Tensor:
        return torch.full(size, 1, dtype=dtype, device=device)

    @classmethod
    def rendezvous(cls, memory: Tensor, name: str) -> Handle:
        group = c10d._resolve_process_group(name)
        group.get_group_store().set(f"rank-{group.rank()}", "here")
        cls.groups.append((group.rank(), group.size()))
        handle = Handle(memory)
        cls.handle = weakref.ref(handle)
        return handle


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(c10d, "_SymmetricMemory", SymmetricMemory)
    SymmetricMemory.groups = []


def test_rendezvous_resolves_registered_group() -> None:
    comm = Comm()
    for _ in range(2):  # a second model of the same process
        peers = open_symmetric_memory(comm, HIDDEN_SIZE, torch.bfloat16, DEVICE)
    assert SymmetricMemory.groups == [(1, 2)] * 2
    assert comm.store.get("quire/rank-1") == b"here"
    assert peers.size == 2
    assert peers.max_tokens == MAX_BYTES // (2 * HIDDEN_SIZE)
    assert not any(signals.any() for signals in peers.signals)
    assert all(len(signals) == 2 * NUM_SIGNALS for signals in peers.signals)
    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group("quire")


def test_peers_keep_symmetric_memory() -> None:
    peers = open_symmetric_memory(Comm(), HIDDEN_SIZE, torch.bfloat16, DEVICE)
    gc.collect()
    assert SymmetricMemory.handle() is not None
    del peers
    gc.collect()
    assert SymmetricMemory.handle() is None


def test_one_visible_gpu_per_rank_is_refused() -> None:
    """torch's own error would be: detected allocations from overlapping devices."""
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 both have index 0.*sees only its own.*NOSET_CUDA"):
        open_symmetric_memory(Comm(indices=(0, 0)), HIDDEN_SIZE, torch.bfloat16, DEVICE)
    assert SymmetricMemory.groups == []


def test_ranks_on_several_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0 and 1 are on different hosts or in different containers"):
        open_symmetric_memory(Comm(hosts=(7, 8)), HIDDEN_SIZE, torch.bfloat16, DEVICE)


def test_failed_rendezvous_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA driver error: no peer access\nand a trace")

    monkeypatch.setattr(SymmetricMemory, "rendezvous", fail)
    with pytest.raises(ConfigError, match="other's memory: CUDA driver error: no peer access"):
        open_symmetric_memory(Comm(), HIDDEN_SIZE, torch.bfloat16, DEVICE)
    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group("quire")
