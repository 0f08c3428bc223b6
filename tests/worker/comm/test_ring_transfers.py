"""RingTransfers: tensors of all sizes between ranks of one host, and ranks that leave or are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.kernels.native.library import is_available
from quire.worker.comm import ring_transfers
from quire.worker.comm.ring_transfers import RingTransfers
from quire.worker.comm.torch_distributed import TorchDistributed, create_store

HOST = "127.0.0.1"
CPU = torch.device("cpu")
# Far less than the largest tensor, and no multiple of it.
SMALL_RING = 4096 + 64

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")


def on_ranks(function: Callable[[int, RingTransfers], Any], size: int = 2) -> list[Any]:
    """Run the function on each rank, as threads; close the transfers."""
    store, port = create_store(HOST)

    def run(rank: int) -> Any:
        group = TorchDistributed.join(rank, size, HOST, port, CPU, timeout_s=60)
        transfers = RingTransfers(group, [each for each in range(size) if each != rank], 60.0)
        try:
            return function(rank, transfers)
        finally:
            transfers.close()
            group.close()

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    del store
    return results


def numbers(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("ring_bytes", [SMALL_RING, 1 << 20])
def test_tensors_arrive_in_order_and_whole(ring_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is late at first, and the largest tensors fill the small ring several times."""
    monkeypatch.setattr(ring_transfers, "RING_BYTES", ring_bytes)
    counts = [1, 7, 0, 1040, 5000, 3, 100_000, 2]
    has_received = threading.Event()

    def transfer(rank: int, transfers: RingTransfers) -> bool:
        if rank == 0:
            for count in counts:
                transfers.send(numbers(count), 1, 0).wait()
            return has_received.wait(60)
        posted = [transfers.receive(torch.empty(count), 0, 0) for count in counts]
        received = [each.wait() for each in posted]
        has_received.set()
        return all(torch.equal(each, numbers(len(each))) for each in received)

    assert on_ranks(transfer) == [True, True]


def test_transfers_of_a_rank_that_left_fail() -> None:
    has_left = threading.Event()

    def transfer(rank: int, transfers: RingTransfers) -> None:
        if rank == 0:
            transfers.send(numbers(3), 1, 0).wait()
            transfers.close()
            has_left.set()
            return
        assert has_left.wait(60)
        assert torch.equal(transfers.receive(torch.empty(3), 0, 0).wait(), numbers(3))  # sent before
        with pytest.raises(ConnectionError, match="receive from rank 0 of rank 1 failed: it has ended"):
            transfers.receive(torch.empty(1), 0, 0).wait()
        transfers.close()
        with pytest.raises(ConnectionError, match=r"rank 1 has left the group|failed"):
            transfers.receive(torch.empty(1), 0, 0).wait()

    on_ranks(transfer)


PEER = """
import sys, torch
from quire.worker.comm.ring_transfers import RingTransfers
from quire.worker.comm.torch_distributed import TorchDistributed
group = TorchDistributed.join(1, 2, "127.0.0.1", int(sys.argv[1]), torch.device("cpu"), timeout_s=240)
transfers = RingTransfers(group, [0], 240.0)
transfers.send(torch.arange(3), 0, 0).wait()
transfers.receive(torch.empty(1), 0, 0).wait()
"""


def test_killed_sender_is_named() -> None:
    store, port = create_store(HOST)
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(port)])
    try:
        group = TorchDistributed.join(0, 2, HOST, port, CPU, timeout_s=240)
        transfers = RingTransfers(group, [1], 240.0)
        assert transfers.receive(torch.empty(3, dtype=torch.int64), 1, 0).wait().tolist() == [0, 1, 2]
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionError, match="receive from rank 1 of rank 0 failed: it has ended"):
            transfers.receive(torch.empty(1), 1, 0).wait()
        transfers.close()
        group.close()
    finally:
        peer.kill()
        peer.communicate(timeout=60)
    del store
