"""Stage `ranks`: a rank that is killed in the middle of a graph, and two ranks on one GPU over gloo, one killed."""

from __future__ import annotations

import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.rank_process import DECODING, JOIN, LEAVE, LEFT, READY, read_frame, write_frame
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import Server
from benchmarks.gpu.sizes import TINY, Sizes
from quire.proto.config import EngineConfig
from quire.proto.errors import RankFailed
from quire.proto.replica_status import RankStatus
from quire.proto.step import EncoderInput, StepFailure, StepPlan, StepResult, decode_reply
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.service.worker_group import Rebuilt
from quire.worker.comm.torch_distributed import create_store

NUM_TOKENS = 16
PROMPT_LENS = (5, 1, 70, 33)
# Equal numbers of ranks and devices give equal tokens in float32.
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 128, "max_num_seqs": 8}
# A case needs about this long with the compilation of kernels.
CASE_S = 20.0
REPLY_S = 60.0
# A killed process's memory is free within this time, up to so many bytes that the driver keeps.
FREED_S, KEPT_BYTES = 10.0, 64 << 20
_HOST = "127.0.0.1"


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    prompts = [np.random.default_rng(length).integers(1, TINY.vocab_size, length) for length in PROMPT_LENS]
    with tempfile.TemporaryDirectory() as model:
        write_llama(Path(model), TINY, OPTIONS["dtype"], "cpu")
        expected = generate(Server(Path(model), device="cpu", **OPTIONS), prompts)
        if record.begins("killed in a graph", CASE_S):
            with record.case("killed in a graph"):
                _kill_in_graph(record, Path(model), sizes, prompts, expected)
        if record.begins("two ranks on one device", CASE_S):
            with record.case("two ranks on one device"):
                _run_two_ranks(record, Path(model), sizes, prompts, expected)


def generate(server: Server, prompts: list[Any]) -> list[list[int]]:
    """Return the greedy tokens of each prompt, by an engine that is closed afterwards."""
    try:
        handles = [server.submit(prompt, NUM_TOKENS) for prompt in prompts]
        server.drain()
        return [server.tokens[handle] for handle in handles]
    finally:
        server.close()


def _kill_in_graph(
    record: Record, model: Path, sizes: Sizes, prompts: list[Any], expected: list[list[int]]
) -> None:
    """Kill a process while it decodes in graphs; another one uses the device then, which has lost nothing."""
    free = _free_bytes(sizes.device)
    with start_process(
        "decode", folder=model, prompts=prompts, options=OPTIONS | {"device": sizes.device}
    ) as process:
        assert _read(process) == DECODING
        process.kill()
        process.wait()
    killed_at = time.monotonic()
    while free - _free_bytes(sizes.device) > KEPT_BYTES and time.monotonic() < killed_at + FREED_S:
        time.sleep(0.01)
    lost = free - _free_bytes(sizes.device)
    record.add("ranks.killed.freed_s", time.monotonic() - killed_at, "s", "until its memory was free")
    assert lost <= KEPT_BYTES, f"{lost} bytes of the killed process are not free after {FREED_S:g} s"
    found = generate(Server(model, device=sizes.device, **OPTIONS), prompts)
    assert found == expected, f"{found} differ from {expected}"


def _run_two_ranks(
    record: Record, model: Path, sizes: Sizes, prompts: list[Any], expected: list[list[int]]
) -> None:
    """Compare the tokens of two ranks with those of one, without a failure and with one of the second rank."""
    group: TwoRanks | None = None

    def start(config: EngineConfig) -> tuple[EngineConfig, TwoRanks]:
        nonlocal group
        # Their collectives wait on the host, which graphs cannot record.
        parallel = replace(config.parallel, tensor_parallel_size=2, cuda_graphs=False)
        config = replace(config, parallel=parallel)
        group = TwoRanks(config)
        return config, group

    server = Server(model, start=start, device=sizes.device, **OPTIONS)
    try:
        for is_killed in (False, True):
            handles = [server.submit(prompt, NUM_TOKENS) for prompt in prompts]
            if is_killed:
                server.run(4)
                assert group is not None
                group.processes[1].kill()
            killed_at = time.perf_counter()
            while server.running:
                server.turn()
            if is_killed:
                seconds = time.perf_counter() - killed_at
                record.add(
                    "ranks.two.recovered_s", seconds, "s", "rank 1 replaced, and the rest of the tokens"
                )
                assert group is not None
                assert group.num_replaced == 1
            found = [server.tokens[handle] for handle in handles]
            assert found == expected, f"{found} differ from {expected}"
    finally:
        server.close()


class TwoRanks:
    """WorkerGroup of two processes on one device.

    Attributes:
        processes: by rank.
        num_replaced: processes that were started in place of others.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.num_replaced = 0
        store = self._new_store()
        self.processes = [self._start(rank, store) for rank in range(2)]
        self._await_all(READY)

    def broadcast(self, plan: StepPlan) -> None:
        for process in self.processes:
            _send(process, plan.encode())

    def send_media(self, image: EncoderInput) -> None:
        raise AssertionError("the model reads no images")

    def gather(self, timeout_s: float) -> StepResult:
        replies = [_read(process) for process in self.processes]
        results = [None if reply is None else decode_reply(reply) for reply in replies]
        # A rank that has ended is the cause of what the others report.
        for rank in sorted(range(2), key=lambda rank: results[rank] is not None):
            found = results[rank]
            if found is None:
                raise RankFailed(rank, "its process has ended")
            if isinstance(found, StepFailure):
                raise RankFailed(rank, found.reason)
        first = results[0]
        assert isinstance(first, StepResult)
        return first

    def check(self) -> None:
        """Never raises: a rank that has ended shows at the next step."""

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        """Never raises: `gather` waits for every rank."""

    def statuses(self) -> tuple[RankStatus, ...]:
        device = self._config.parallel.device
        return tuple(
            RankStatus(rank, process.pid, _HOST, device, "") for rank, process in enumerate(self.processes)
        )

    def rebuild(self, epoch: int) -> Rebuilt:
        """Replace the processes that have ended, and let all ranks join a new group."""
        failed = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
        survivors = [rank for rank in range(2) if rank not in failed]
        for rank in survivors:
            _send(self.processes[rank], LEAVE)
        for rank in survivors:
            while _read(self.processes[rank]) != LEFT:
                pass  # replies to steps that were in flight
        store = self._new_store()
        for rank in failed:
            self.processes[rank].communicate()
            self.processes[rank] = self._start(rank, store)
            self.num_replaced += 1
        for rank in survivors:
            _send(self.processes[rank], JOIN + pickle.dumps(store))
        self._await_all(READY)
        return Rebuilt(has_new_ranks=bool(failed), kept=KvTiers.NONE)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def _new_store(self) -> tuple[str, int]:
        self._store, port = create_store(_HOST)
        return _HOST, port

    def _start(self, rank: int, store: tuple[str, int]) -> subprocess.Popen[bytes]:
        return _start("rank", rank=rank, config=self._config, store=store)

    def _await_all(self, reply: bytes) -> None:
        for rank, process in enumerate(self.processes):
            found = _read(process)
            assert found == reply, f"rank {rank} did not start: {found!r}"


@contextmanager
def start_process(what: str, **arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of benchmarks.gpu.rank_process, which is ended after the body."""
    process = _start(what, **arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _start(what: str, **arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu.rank_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    _send(process, pickle.dumps((what, arguments)))
    return process


def _send(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its end shows when it is to reply
        write_frame(process.stdin, frame)


def _read(process: subprocess.Popen[bytes]) -> bytes | None:
    """Return the next frame of a process. Returns None if it has ended. Raises TimeoutError."""
    # Without a buffer, in which another frame would be unseen.
    out: Any = process.stdout
    if not select.select([out], [], [], REPLY_S)[0]:
        raise TimeoutError(f"process {process.pid} has not replied in {REPLY_S:g} s")
    return read_frame(out)


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
