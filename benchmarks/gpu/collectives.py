"""Stage `collectives`: NCCL of one rank on another thread, recorded and not, and the kernel over shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import synchronize
from quire.kernels.all_reduce_norm import NUM_SIGNALS, Peers, all_reduce_add_rms_norm
from quire.worker.comm.torch_distributed import TorchDistributed, create_store
from quire.worker.graphs.graphs import CudaGraphs
from quire.worker.rank.device import compute_device, on_device

_HOST = "127.0.0.1"
_TIMEOUT_S = 30.0


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    device = compute_device(sizes.device)
    with record.case("join"):
        store, port = create_store(_HOST)
        comm = on_thread(lambda: _join(port, device))
        with record.case("all-reduce on another thread"):
            on_thread(lambda: _check_all_reduce(comm, device))
        if sizes.device == "cuda":
            with record.case("all-reduce in a graph"):
                on_thread(lambda: _check_recorded(comm, device))
        with record.case("leave"):
            on_thread(comm.close)
        del store
    with record.case("fused all-reduce"):
        _check_fused(record, sizes)


def on_thread(function: Callable[[], TorchDistributed | None]) -> TorchDistributed:
    """Call a function on a new thread, as Ray calls a rank's methods; raise its exception."""
    results: list[TorchDistributed | None] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the call has not ended in {_TIMEOUT_S:g} s")
    return results[0]  # type: ignore[return-value]


def _join(port: int, device: torch.device) -> TorchDistributed:
    with on_device(device):
        return TorchDistributed.join(0, 1, _HOST, port, device, _TIMEOUT_S)


def _check_all_reduce(comm: TorchDistributed, device: torch.device) -> None:
    with on_device(device):
        ones = torch.ones(1000, device=device)
        assert float(comm.all_reduce(ones).sum()) == 1000
        assert comm.all_gather(ones).shape == (1, 1000)


def _check_recorded(comm: TorchDistributed, device: torch.device) -> None:
    with on_device(device):
        x = torch.ones(1000, device=device)
        graphs = CudaGraphs(device)

        def compute() -> torch.Tensor:
            return comm.all_reduce(x * 2)

        graphs.warm_up(compute)
        recording = graphs.record(compute)
        x.fill_(3)
        recording.replay()
        assert float(recording.output.sum()) == 6000


def _check_fused(record: Record, sizes: Sizes) -> None:
    """Two ranks as two streams of one GPU; on a CPU one rank, which waits for nobody."""
    for two_shots_from in (1, 100):
        _check_shots(sizes, two_shots_from)
    record.notes["fused ranks"] = 2 if sizes.device == "cuda" else 1


def _check_shots(sizes: Sizes, two_shots_from: int) -> None:
    device, hidden = sizes.device, sizes.model.hidden_size
    num_ranks = 2 if device == "cuda" else 1
    dtype = getattr(torch, sizes.dtype)
    buffers = [torch.zeros(2, 8, hidden, dtype=dtype, device=device) for _ in range(num_ranks)]
    signals = [
        torch.zeros(NUM_SIGNALS * num_ranks, dtype=torch.int32, device=device) for _ in range(num_ranks)
    ]
    peers = [Peers(rank, buffers, signals) for rank in range(num_ranks)]
    for each in peers:
        each.two_shots_from = two_shots_from
    parts = [torch.randn(4, hidden, device=device).to(dtype) for _ in range(num_ranks)]
    weight = torch.ones(hidden, dtype=dtype, device=device)
    total = torch.stack(parts).float().sum(dim=0)
    expected = total * (total.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
    residuals = [torch.zeros(4, hidden, dtype=dtype, device=device) for _ in range(num_ranks)]
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(num_ranks)]
    synchronize(device)  # the host prepares nothing while a kernel waits for the one of the other rank
    outs = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            outs.append(all_reduce_add_rms_norm(parts[rank], residuals[rank], weight, 1e-5, peers[rank]))
    synchronize(device)
    for out in outs:
        torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)
