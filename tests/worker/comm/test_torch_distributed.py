"""TorchDistributed over real sockets and processes, and its errors for absent ranks."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
import torch.distributed

from quire.proto.step import RowSampling, StepResult, decode_reply
from quire.worker.comm import torch_distributed
from quire.worker.comm.torch_distributed import TorchDistributed, create_store, interface_of

HOST = "127.0.0.1"
dist: Any = torch.distributed

# Program of a rank: reads its rank, config, store port, number of blocks and plans from stdin.
RANK = """
import pickle, sys, torch
from quire.proto.step import StepPlan
from quire.worker.comm import torch_distributed
from quire.worker.comm.torch_distributed import TorchDistributed
from quire.worker.rank.runner import ModelRunner

rank, config, port, num_blocks, frames = pickle.load(sys.stdin.buffer)
runner = ModelRunner(config, TorchDistributed.join(rank, 2, "127.0.0.1", port, torch.device("cpu"), timeout_s=120))
runner.allocate_cache(num_blocks)
results = [runner.execute(StepPlan.decode(frame)).encode() for frame in frames]
runner.close()
pickle.dump(results, sys.stdout.buffer)
"""


def test_two_processes_over_gloo_give_tokens_of_two_threads(
    make_model: Any, make_engine: Any, planned: Any, engine_config: Any
) -> None:
    folder = make_model("qwen2")
    engine = make_engine(folder, 2, num_blocks=64)  # the sum of two numbers is the same in either order
    settings = [RowSampling(temperature=0.0), RowSampling(seed=3), RowSampling(seed=4, top_p=0.9, logprobs=2)]
    sequences = [planned(list(range(9, 9 + 20 * n)), 8, s) for n, s in enumerate(settings, start=1)]
    frames: list[bytes] = []
    expected = engine.generate(sequences, chunk_len=24, record=frames)
    store, port = create_store(HOST)
    inputs = [pickle.dumps((rank, engine_config(folder, 2), port, 64, frames)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        ran = list(threads.map(run_rank, inputs))
    del store
    tokens = [[tokens_of(reply) for reply in replies] for replies in ran]
    assert tokens[0] == [result.token_ids.tolist() for result in expected]
    assert all(not step for step in tokens[1])


def tokens_of(reply: bytes) -> list[int]:
    result = decode_reply(reply)
    assert isinstance(result, StepResult)
    tokens: list[int] = result.token_ids.tolist()
    return tokens


def run_rank(stdin: bytes) -> list[bytes]:
    ran = subprocess.run(
        [sys.executable, "-c", RANK], input=stdin, capture_output=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    replies: list[bytes] = pickle.loads(ran.stdout)  # noqa: S301  (from our own child)
    return replies


def test_all_reduce_and_all_gather_over_gloo() -> None:
    store, port = create_store(HOST)
    results: dict[int, tuple[list[float], list[list[float]]]] = {}

    def on_rank(rank: int) -> None:
        comm = TorchDistributed.join(rank, 3, HOST, port, torch.device("cpu"), timeout_s=60)
        summed = comm.all_reduce(torch.tensor([1.0, 10.0 * rank]))
        results[rank] = summed.tolist(), comm.all_gather(torch.tensor([float(rank), 7.0])).tolist()
        comm.barrier()
        comm.close()
        comm.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(on_rank, range(3)))
    del store
    assert results == {rank: ([3.0, 30.0], [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]) for rank in range(3)}


def test_join_times_out_without_other_rank() -> None:
    store, port = create_store(HOST)
    with pytest.raises(
        ConnectionError, match=r"joining at 127\.0\.0\.1:\d+ of rank 0 with the others of 2 failed"
    ):
        TorchDistributed.join(0, 2, HOST, port, torch.device("cpu"), timeout_s=1)
    del store


def test_collective_fails_after_other_rank_left() -> None:
    store, port = create_store(HOST)
    left = threading.Event()

    def leave() -> None:
        TorchDistributed.join(1, 2, HOST, port, torch.device("cpu"), timeout_s=60).close()
        left.set()

    leaver = threading.Thread(target=leave)
    leaver.start()
    comm = TorchDistributed.join(0, 2, HOST, port, torch.device("cpu"), timeout_s=60)
    assert left.wait(60)
    leaver.join()
    with pytest.raises(ConnectionError, match="all-reduce of rank 0 with the others of 2 failed"):
        comm.all_reduce(torch.ones(4))
    comm.close()
    with pytest.raises(ConnectionError, match="rank 0 has left the group"):
        comm.barrier()
    del store


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_meet_after_more_than_the_timeout_of_collectives(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """On a GPU by the store alone, since NCCL's watchdog would end the rank that waits."""
    monkeypatch.setattr(torch_distributed, "MEETING_CHECK_S", 0.01)
    store, port = create_store(HOST)
    timeout_s = 60.0

    def join(rank: int) -> TorchDistributed:
        return TorchDistributed.join(rank, 2, HOST, port, torch.device("cpu"), timeout_s=60)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(join, range(2))
        waited, wait = threading.Event(), first.store.wait

        def count(*arguments: Any) -> None:
            try:
                wait(*arguments)
            except dist.DistStoreError:
                waited.set()
                raise

        if device == "cuda":
            first = on_gpu(FailingGroup(), Waiting(first.store, count))
            second = on_gpu(FailingGroup(), second.store, rank=1)
            other = threads.submit(first.meet, timeout_s)
            assert waited.wait(60)
            assert not other.done()
        else:
            other = threads.submit(first.meet, timeout_s)
        second.meet(timeout_s)
        other.result(60)
        later = [threads.submit(each.meet, timeout_s) for each in (first, second)]
        for each in later:
            each.result(60)
    del store


class Waiting:
    """A store whose waits a test sees."""

    def __init__(self, store: Any, wait: Any) -> None:
        self._store, self.wait = store, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_meeting_ends_when_the_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread leaves it, as after the failure of a rank that will not come."""
    monkeypatch.setattr(torch_distributed, "MEETING_CHECK_S", 0.01)
    store = LonelyStore()
    comm = store.leaver = on_gpu(FailingGroup(), store)
    with pytest.raises(ConnectionError, match="rank 0 has left the group"):
        comm.meet(1800)


class LonelyStore:
    """A store at which one rank waits, until `leaver` leaves the group during its third wait."""

    num_waits = 0
    leaver: TorchDistributed | None = None

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait(self, keys: list[str], timeout: Any) -> None:
        self.num_waits += 1
        assert self.num_waits <= 3
        if self.num_waits == 3 and self.leaver is not None:
            self.leaver.close()
        raise dist.DistStoreError("wait timeout")


def test_meeting_without_another_rank_names_its_deadline() -> None:
    comm = on_gpu(FailingGroup(), LonelyStore())
    with pytest.raises(ConnectionError, match=r"meeting in 0\.5 s of rank 0 with the others of 2 failed"):
        comm.meet(0.5)


class FailingGroup:
    """An NCCL group that raises when a collective is started."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp, "NCCL would use a stream of its own"
        raise RuntimeError("NCCL error: remote process exited\nand a trace")

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp, "NCCL would use a stream of its own"
        raise RuntimeError("NCCL error: remote process exited\nand a trace")

    def abort(self) -> None: ...


def on_gpu(group: Any, store: Any = None, rank: int = 0) -> TorchDistributed:
    """Return a communicator of one of two GPUs."""
    return TorchDistributed(rank, 2, torch.device("cuda", 0), store, group)


def test_collective_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    comm = on_gpu(FailingGroup())
    with pytest.raises(ConnectionError, match="all-reduce of rank 0 with the others of 2 failed: NCCL error"):
        comm.all_reduce(torch.ones(4))
    with pytest.raises(ConnectionError, match="all-gather of rank 0 with the others of 2 failed: NCCL error"):
        comm.all_gather(torch.ones(4))


def test_collective_that_cannot_be_recorded_is_an_error_of_the_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="NCCL error"):
        on_gpu(FailingGroup()).all_reduce(torch.ones(4))


def test_group_is_left_while_kernels_wait_for_a_dead_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL's shutdown would wait for them; even abort has a deadline."""
    monkeypatch.setattr(torch_distributed, "CLOSE_TIMEOUT_S", 0.05)
    released = threading.Event()

    class StuckGroup:
        num_aborts = 0

        def abort(self) -> None:
            self.num_aborts += 1
            released.wait(60)

    group = StuckGroup()
    comm = on_gpu(group)
    comm.close()
    comm.close()
    released.set()
    assert group.num_aborts == 1
    assert "rank 0: the group was not left in 0.05 s" in caplog.text


def test_group_is_left_whose_abort_waits_for_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs are dropped during the abort: before it they could wait for kernels that only it ends."""
    monkeypatch.setattr(torch_distributed, "CLOSE_TIMEOUT_S", 60)
    aborting, dropped = threading.Event(), threading.Event()

    class RecordedGroup:
        def abort(self) -> None:
            aborting.set()
            assert dropped.wait(60)

    def drop_recordings() -> None:
        assert aborting.wait(60)
        dropped.set()

    comm = on_gpu(RecordedGroup())
    comm.close(drop_recordings)
    assert dropped.is_set()
    dropped.clear()
    comm.close(dropped.set)
    assert dropped.is_set()
    assert "was not left" not in caplog.text


def test_store_listens_on_its_address_only() -> None:
    store, port = create_store("127.0.0.2")
    # Another process may listen on the same port of another address.
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.2"]
    socket.create_connection(("127.0.0.2", port), timeout=60).close()
    del store


def test_interface_of_finds_interface_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None  # reserved for documentation
