"""ProcessRanks: the ranks of a replica in real processes without Ray, on this host or on two, that may be killed."""

from __future__ import annotations

import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from quire.proto.config import EngineConfig
from quire.proto.errors import RankFailed
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.step import StepFailure, StepPlan, StepResult, decode_reply
from quire.worker.comm.torch_distributed import create_store

DEADLINE_S = 400.0
_LENGTH = struct.Struct("<I")

# Program of a rank. It reads its rank, config, store and number of blocks from stdin, then plans and orders to join.
_RANK = """
import pickle, struct, sys, torch
from quire.proto.errors import RankFailed
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.step import StepFailure, StepPlan
from quire.worker.comm.replica_groups import ReplicaGroups
from quire.worker.rank.runner import ModelRunner

def read():
    size = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(struct.unpack("<I", size)[0]) if size else None

def write(frame):
    sys.stdout.buffer.write(struct.pack("<I", len(frame)) + frame)
    sys.stdout.buffer.flush()

rank, config, store, num_blocks = pickle.loads(read())
groups = ReplicaGroups(ParallelSplit.of(config.parallel), rank, torch.device("cpu"), 240.0)
own = groups.join(*store)
runner = ModelRunner(config, own.tensor, pipeline=own)
runner.allocate_cache(num_blocks)
write(b"ready")
has_left = False
while (frame := read()) is not None:
    if frame[:4] == b"join":
        groups.join_again(*pickle.loads(frame[4:]))
        runner.reset(has_new_ranks=True)
        has_left = False
        write(b"ready")
    elif frame == b"leave":
        own.close()
        has_left = True
        write(b"left")
    elif not has_left:
        try:
            write(runner.execute(StepPlan.decode(frame)).encode())
        except RankFailed as error:
            own.close()
            has_left = True
            write(StepFailure(0, 1, rank, error.stage or "", error.problem).encode())
"""


@dataclass
class ProcessRanks:
    """A worker group for RankedDriver.

    Attributes:
        address: of the store, on the host of rank 0.
        prefixes: of commands on the host of each rank.
    """

    config: EngineConfig
    num_blocks: int
    address: str
    prefixes: Sequence[Sequence[str]]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)

    def start(self) -> None:
        store = self._new_store()
        self.processes = [self._start(rank, store) for rank in range(len(self.prefixes))]
        self._await_all(b"ready")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def broadcast(self, plan: StepPlan) -> None:
        for rank in range(len(self.processes)):
            self._send(rank, plan.encode())

    def gather(self, timeout_s: float) -> StepResult:
        """Return the result of the oldest step. Raises RankFailed for the first rank that reports a failure."""
        replies = [self._receive(rank) for rank in range(len(self.processes))]
        decoded = [None if reply is None else decode_reply(reply) for reply in replies]
        for rank, reply in enumerate(decoded):
            if reply is None or isinstance(reply, StepFailure):
                reason = "its process has ended" if reply is None else reply.reason
                raise RankFailed(rank, reason)
        result = decoded[ParallelSplit.of(self.config.parallel).result_rank]
        assert isinstance(result, StepResult)
        stored = tuple(own for each in decoded if isinstance(each, StepResult) for own in each.stored_reports)
        return replace(result, stage_times={}, stored_reports=stored)

    def replace(self, failed: int) -> None:
        """Start a process in place of a killed one, and let all ranks join a new group."""
        survivors = [rank for rank in range(len(self.processes)) if rank != failed]
        for rank in survivors:
            self._send(rank, b"leave")
        for rank in survivors:
            while self._receive(rank) != b"left":
                pass  # replies to steps that were in flight
        store = self._new_store()
        self.processes[failed].communicate(timeout=DEADLINE_S)
        self.processes[failed] = self._start(failed, store)
        for rank in survivors:
            self._send(rank, b"join" + pickle.dumps(store))
        self._await_all(b"ready")

    def _new_store(self) -> tuple[str, int]:
        store, port = create_store(self.address)
        self.stores.append(store)
        return self.address, port

    def _start(self, rank: int, store: tuple[str, int]) -> subprocess.Popen[bytes]:
        command = [*self.prefixes[rank], sys.executable, "-c", _RANK]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes[rank : rank + 1] = [process]
        self._send(rank, pickle.dumps((rank, self.config, store, self.num_blocks)))
        return process

    def _await_all(self, reply: bytes) -> None:
        for rank in range(len(self.processes)):
            assert self._receive(rank) == reply, f"rank {rank} did not start"

    def _send(self, rank: int, frame: bytes) -> None:
        pipe = self.processes[rank].stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # its end shows when it is to reply
            pipe.write(_LENGTH.pack(len(frame)) + frame)
            pipe.flush()

    def _receive(self, rank: int) -> bytes | None:
        """Return the next reply of a rank. Returns None if its process has ended."""
        header = self._read(rank, _LENGTH.size)
        return None if header is None else self._read(rank, _LENGTH.unpack(header)[0])

    def _read(self, rank: int, count: int) -> bytes | None:
        pipe, found, deadline = self.processes[rank].stdout, b"", time.monotonic() + DEADLINE_S
        assert pipe is not None
        while len(found) < count:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"rank {rank} does not reply"
            part = pipe.raw.read(count - len(found))  # type: ignore[attr-defined]
            if not part:
                return None
            found += part
        return found
