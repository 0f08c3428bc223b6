"""SharedMemoryCommunicator: sums and gathers, and ranks that are late, closed or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.native.library import is_available
from quire.kernels.shm_collectives import SLOT_BYTES
from quire.worker.comm import shared_memory
from quire.worker.comm.communicator import Communicator
from quire.worker.comm.shared_memory import SharedMemoryCommunicator, join_group
from quire.worker.comm.torch_distributed import TorchDistributed, create_store

HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")


def on_ranks(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """Run the function on each of `size` ranks of one group, as threads; close the ranks."""
    store, port = create_store(HOST)

    def run(rank: int) -> Any:
        comm = join_group(rank, size, HOST, port, torch.device("cpu"), timeout_s=60)
        try:
            return function(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    del store
    return results


def of_rank(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_rank_order_and_bit_identical_on_all_ranks(size: int, dtype: torch.dtype) -> None:
    counts = [1, 5, 16, 1000, SLOT_BYTES // 2 + 3]

    def sums(comm: Communicator) -> list[Tensor]:
        return [comm.all_reduce(of_rank(comm.rank, count, dtype)) for count in counts]

    for results in zip(*on_ranks(size, sums), strict=True):
        assert all(torch.equal(result, results[0]) for result in results)
        if dtype != torch.float16:  # float16 sums are made by gloo
            parts = [of_rank(rank, len(results[0]), dtype).float() for rank in range(size)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            assert torch.equal(results[0], total.to(dtype))


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all_delivers_the_rows_of_each_rank(
    size: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, none, rows that fill several rounds, and one exchange after the other."""
    monkeypatch.setattr(shared_memory, "EXCHANGE_BYTES", 1 << 10)
    patterns = [
        [[(3 * own + to + pattern) % 5 * scale for to in range(size)] for own in range(size)]
        for pattern, scale in enumerate((1, 0, 7, 100, 1, 1))
    ]

    def exchange(comm: Communicator) -> list[Tensor]:
        own = comm if is_shared else getattr(comm, "group", comm)
        received = []
        for counts in patterns:
            rows = [
                torch.full((count, 3), float(10 * comm.rank + to))
                for to, count in enumerate(counts[comm.rank])
            ]
            received.append(own.all_to_all(torch.cat(rows), counts).wait())
        return received

    for rank, results in enumerate(on_ranks(size, exchange)):
        for counts, received in zip(patterns, results, strict=True):
            expected = [
                float(10 * sender + rank) for sender in range(size) for _ in range(counts[sender][rank])
            ]
            assert received[:, 0].tolist() == expected
            assert received.shape == (len(expected), 3)


def test_all_gather_supports_any_dtype_and_shape() -> None:
    def gather(comm: Communicator) -> list[Tensor]:
        assert isinstance(comm, SharedMemoryCommunicator)
        wide = torch.full((SLOT_BYTES // 4 + 1,), float(comm.rank))
        return [
            comm.all_gather(torch.tensor([[comm.rank, 7]])),
            comm.all_gather(torch.arange(6).view(2, 3).t() + comm.rank),
            comm.all_gather(wide)[:, -1],
        ]

    expected = [
        torch.tensor([[[0, 7]], [[1, 7]]]),
        torch.stack([torch.arange(6).view(2, 3).t() + rank for rank in range(2)]),
        torch.tensor([0.0, 1.0]),
    ]
    for results in on_ranks(2, gather):
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_many_sums_stay_synchronized() -> None:
    def rounds(comm: Communicator) -> list[float]:
        return [float(comm.all_reduce(torch.full((64,), float(i + comm.rank)))[i % 64]) for i in range(3000)]

    expected = [2.0 * i + 1 for i in range(3000)]
    assert on_ranks(2, rounds) == [expected, expected]


def test_late_rank_is_named_after_deadline() -> None:
    given_up = threading.Event()

    def meet(comm: Communicator) -> None:
        if comm.rank == 1:
            assert given_up.wait(60)
            return
        assert isinstance(comm, SharedMemoryCommunicator)
        comm.timeout_s = 0.3  # shortened only after joining
        with pytest.raises(
            ConnectionError, match=r"all-gather of rank 0 .* rank 1 did not arrive within 0\.3 s"
        ):
            comm.barrier()
        given_up.set()

    on_ranks(2, meet)


def test_closed_rank_is_named_at_once() -> None:
    def meet(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(ConnectionError, match="rank 1 has ended"):
                comm.barrier()

    on_ranks(2, meet)


def test_ranks_of_several_hosts_use_gloo_and_open_no_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = iter(range(2))
    monkeypatch.setattr(shared_memory, "host_id", lambda: next(hosts))
    monkeypatch.setattr(shared_memory, "open_file", lambda *_: pytest.fail("a foreign process was opened"))

    def add(comm: Communicator) -> list[float]:
        assert isinstance(comm, TorchDistributed)
        return comm.all_reduce(torch.full((3,), 1.0 + comm.rank)).tolist()

    assert on_ranks(2, add) == [[3.0] * 3] * 2


def test_host_number_is_equal_for_processes_of_one_host() -> None:
    script = "from quire.worker.comm.shared_memory import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(other.stdout) == shared_memory.host_id()


def test_all_ranks_use_gloo_if_one_cannot_map_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "open_file", lambda *_: None)
    files = num_segments()
    assert on_ranks(2, lambda comm: type(comm)) == [TorchDistributed, TorchDistributed]
    assert num_segments() == files


def test_failed_join_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "open_file", fail)
    files = num_segments()
    with pytest.raises(ConnectionError):
        on_ranks(2, lambda comm: None)
    assert num_segments() == files


def fail(*_: object) -> None:
    raise ConnectionError("rank 0 has ended")


def num_segments() -> int:
    """Return the number of shared-memory files that this process has open."""
    return sum("quire-collectives" in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())


VICTIM = """
import os, sys, torch
from quire.worker.comm.shared_memory import join_group
comm = join_group(1, 2, "127.0.0.1", int(sys.argv[1]), torch.device("cpu"), 120)
comm.all_reduce(torch.ones(4))
print("ready", flush=True)
sys.stdin.read()
"""


def test_killed_rank_is_named_before_deadline() -> None:
    store, port = create_store(HOST)
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    comm = join_group(0, 2, HOST, port, torch.device("cpu"), 120)
    assert isinstance(comm, SharedMemoryCommunicator)
    comm.all_reduce(torch.ones(4))
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"ready\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)
    with pytest.raises(
        ConnectionError, match="all-reduce of rank 0 with the others of 2 failed: rank 1 has ended"
    ):
        comm.all_reduce(torch.ones(4))
    with pytest.raises(ConnectionError, match="of rank 0 with the others of 2 failed: rank 1 has ended"):
        comm.all_to_all(torch.ones(4, 2), [[2, 2], [0, 0]]).wait()
    comm.close()
    comm.close()
    with pytest.raises(ConnectionError, match="rank 0 has left the group"):
        comm.all_to_all(torch.ones(4, 2), [[2, 2], [0, 0]])
    del store
