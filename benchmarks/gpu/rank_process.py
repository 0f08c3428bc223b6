"""Process of a rank for the stage `ranks`: one of two on one GPU, or one that decodes until it is killed."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.server import Server
from quire.proto.config import EngineConfig
from quire.proto.errors import RankFailed
from quire.proto.step import StepFailure, StepPlan
from quire.worker.comm.communicator import ReplaceableGroup
from quire.worker.comm.torch_distributed import TorchDistributed
from quire.worker.rank.device import compute_device, on_device
from quire.worker.rank.runner import ModelRunner

READY, LEFT, DECODING = b"ready", b"left", b"decoding"
JOIN, LEAVE = b"join", b"leave"
# A rank compiles its kernels while the other one waits.
TIMEOUT_S = 60.0
_LENGTH = struct.Struct("<I")
_CPU = torch.device("cpu")


class HostCollectives(TorchDistributed):
    """gloo between processes of one GPU, which NCCL refuses: tensors pass through host memory, and the host waits."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return super().all_reduce(tensor.cpu()).to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return super().all_gather(tensor.cpu()).to(tensor.device)


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame of a pipe. Returns None at its end."""
    size = _read_bytes(stream, _LENGTH.size)
    return _read_bytes(stream, _LENGTH.unpack(size)[0]) if size else None


def _read_bytes(stream: IO[bytes], count: int) -> bytes:
    """Return so many bytes of a pipe, which gives them in parts, or fewer at its end."""
    found = b""
    while len(found) < count and (part := stream.read(count - len(found))):
        found += part
    return found


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def main() -> None:
    # What others print must not come between the frames.
    frames_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = read_frame(sys.stdin.buffer)
    assert order is not None, "the pipe has ended"
    what, arguments = pickle.loads(order)  # noqa: S301  (of the parent)
    programs: dict[str, Callable[..., None]] = {"rank": _serve_rank, "decode": _decode_forever}
    programs[what](frames_out, **arguments)


def _serve_rank(out: IO[bytes], rank: int, config: EngineConfig, store: tuple[str, int]) -> None:
    """Execute plans as a rank's process does, until the pipe ends: leave a group that has failed, and join others."""
    size, device = config.parallel.tensor_parallel_size, compute_device(config.parallel.device)

    def join(host: str, port: int) -> HostCollectives:
        return HostCollectives.join(rank, size, host, port, _CPU, TIMEOUT_S)

    with on_device(device):
        group = ReplaceableGroup(join(*store))
        runner, has_left = ModelRunner(config, group, device=device), False
        assert config.cache.num_kv_blocks is not None
        runner.allocate_cache(config.cache.num_kv_blocks)
        write_frame(out, READY)
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            if frame.startswith(JOIN):
                group.replace(join(*pickle.loads(frame[len(JOIN) :])))  # noqa: S301
                runner.reset(has_new_ranks=True)
                has_left = False
                write_frame(out, READY)
            elif frame == LEAVE:
                group.close()
                has_left = True
                write_frame(out, LEFT)
            elif not has_left:
                try:
                    write_frame(out, runner.execute(StepPlan.decode(frame)).encode())
                except RankFailed as error:
                    group.close()
                    has_left = True
                    write_frame(out, StepFailure(0, 1, rank, error.stage or "", error.problem).encode())
        runner.close()


def _decode_forever(out: IO[bytes], folder: Path, prompts: list[Any], options: dict[str, Any]) -> None:
    """Decode one request after the other; say so once steps are replayed."""
    server = Server(folder, **options)
    while True:
        for prompt in prompts:
            server.submit(np.asarray(prompt), 64)
        server.run(8)
        write_frame(out, DECODING)
        server.drain()


if __name__ == "__main__":
    main()
