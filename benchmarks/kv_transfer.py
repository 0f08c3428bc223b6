"""Rates at which one process reads the KV blocks of another one, beside sockets and a copy of memory.

    python -m benchmarks.kv_transfer --json FILE

A lender and a reader with a rank each, 32 layers of 8 heads of 128 numbers in bfloat16, 64 KiB per layer and block.
NIXL is measured where it is installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import torch

from benchmarks.common import Figure, make_parser, report
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.proto.config import EngineConfig, ModelConfig
from quire.proto.kv_layout import layout_of
from quire.proto.kv_transfer import KvGrant, KvOrders, KvPull, KvReportKind
from quire.proto.transport.network import CurveKeys
from quire.worker.memory.kv_memory import KvMemory
from quire.worker.transfer import peers
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.messages import READ_BYTES
from quire.worker.transfer.sealed_stream import KEY_BYTES, SealedStream
from quire.worker.transfer.service import KvService

NUM_BLOCKS, NUM_LAYERS, REPEATS = 129, 32, 15
# way |-> what it is, and the figure that it is a share of.
WAYS = {
    "memory": ("the reader copies from the lender's memory, on one host", "memcpy"),
    "buffer": ("the lender copies into shared memory, on one host", "memcpy"),
    "stream": ("AES-GCM over TCP", "tcp_encrypted"),
    "frames": ("ZeroMQ's CURVE over TCP", "tcp_plain"),
}
if importlib.util.find_spec("nixl") is not None:
    WAYS["nixl"] = "NIXL over UCX's TCP, not encrypted, with a checksum on each side", "tcp_plain"
CPU = torch.device("cpu")
TIMEOUT_S = 600.0


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("UCX_TLS", "tcp,self")
    num_bytes = (NUM_BLOCKS - 1) * sum(layout_of(make_config(), 0, "").block_bytes)
    with ExitStack() as stack:
        measured: dict[str, Callable[[], Seconds]] = {
            "memcpy": make_copy(num_bytes),
            "tcp_plain": stack.enter_context(open_tcp(num_bytes, key=b"")),
            "tcp_encrypted": stack.enter_context(open_tcp(num_bytes, key=bytes(KEY_BYTES))),
        }
        measured |= {way: stack.enter_context(open_pulls(way)) for way in WAYS}
        # In turns: what else runs on the machine is the same for all.
        rounds = [{name: measure() for name, measure in measured.items()} for _ in range(REPEATS)]
    figures = dict[str, Figure]()
    for kind, text in (("wall", ""), ("busy", ", by processor time of the busier process")):
        rates = {
            name: num_bytes / min(getattr(each[name], kind) for each in rounds) / 1e9 for name in measured
        }
        prefix = "kv_transfer." if kind == "wall" else "kv_transfer.busy."
        for name, rate in rates.items():
            note, _ = WAYS.get(name, (f"{num_bytes >> 20} MiB at once, best of {REPEATS}", ""))
            figures[f"{prefix}{name}"] = Figure(rate, "GB/s", f"{note}{text}")
        for name, (_, limit) in WAYS.items():
            figures[f"{prefix}{name}_share"] = Figure(
                100 * rates[name] / rates[limit], "%", f"of {limit}{text}"
            )
    report(figures, arguments.json)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of a transfer.

    Attributes:
        busy: processor time of the busier one of the two processes. On a quiet machine with a core for each it is
            nearly the whole time; on others it is what can be compared.
    """

    wall: float
    busy: float


def timed(work: Callable[[], None], other_pid: int | None = None) -> Seconds:
    """Return the time of a transfer between this process and another one."""
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *([] if other_pid is None else [~other_pid << 3 | 2])]
    before, started = [time.clock_gettime(clock) for clock in clocks], time.perf_counter()
    work()
    wall = time.perf_counter() - started
    after = [time.clock_gettime(clock) for clock in clocks]
    return Seconds(wall, max(end - start for start, end in zip(before, after, strict=True)))


def make_config() -> EngineConfig:
    model = ModelConfig(
        path="", name="kv", architecture="", hf={}, dtype="bfloat16", max_model_len=4096, vocab_size=8,
        num_layers=NUM_LAYERS, num_heads=8, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    config = engine_config(EngineOptions("kv", num_kv_blocks=NUM_BLOCKS), model)
    return replace(config, cache=replace(config.cache, kv_transfer=True))


def make_service(way: str, keys: CurveKeys | None, directory: str, name: str) -> KvService:
    config = make_config()
    memory = KvMemory(config, 0, torch.bfloat16, CPU)
    memory.allocate(NUM_BLOCKS)
    blocks = KvBlocks(memory.cache, config.cache_layout, layout_of(config, 0, "w"), CPU)
    endpoint = f"ipc://{directory}/{name}.kv" if keys is None else "tcp://127.0.0.1:*"
    return KvService(blocks, "w", endpoint, keys, lambda body: body(), has_nixl=way == "nixl")


def lend(way: str, keys: CurveKeys | None, directory: str, channel: Connection) -> None:
    """Lend all blocks, in a process of its own."""
    torch.set_num_threads(1)
    service = make_service(way, keys, directory, "lender")
    service.apply(KvOrders(grants=(KvGrant(1, np.arange(1, NUM_BLOCKS, dtype=np.int32)),)))
    channel.send(service.take_reports(is_idle=False)[0].name)
    channel.recv()
    service.close()


@contextmanager
def open_pulls(way: str) -> Iterator[Callable[[], Seconds]]:
    """Yield a function that returns the time of a pull of all blocks, which come by one of the ways."""
    keys = CurveKeys.generate() if way in ("stream", "frames") else None
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        spawn = multiprocessing.get_context("spawn")
        own, others = spawn.Pipe()
        lender = spawn.Process(target=lend, args=(way, keys, directory, others))
        lender.start()
        stack.callback(lender.join)
        stack.callback(own.send, None)
        if not own.poll(TIMEOUT_S):
            raise TimeoutError(f"the lender did not start in {TIMEOUT_S:g} s")
        endpoint = own.recv()
        service = make_service(way, keys, directory, "reader")
        stack.callback(service.close)
        ids = np.arange(1, NUM_BLOCKS, dtype=np.int32)
        numbers = count(1)

        def pull() -> None:
            counts = np.array([ids.size], np.int32)
            order = KvPull(next(numbers), 1, (endpoint,), counts, ids, ids, TIMEOUT_S)
            with only(way):
                service.apply_pulls(KvOrders(pulls=(order,)))
                await_pull(service)

        yield lambda: timed(pull, lender.pid)


@contextmanager
def only(way: str) -> Iterator[None]:
    """Have pulls of the body use one way."""
    with ExitStack() as stack:
        if way != "memory":  # as from a GPU, or from another host
            stack.enter_context(mock.patch.object(peers, "MappedBlocks", side_effect=OSError))
        if way in ("stream", "frames"):
            stack.enter_context(mock.patch.object(peers._Buffer, "address", return_value=None))
        if way == "frames":
            stack.enter_context(mock.patch.object(peers, "_connect_stream", return_value=None))
        yield


def await_pull(service: KvService) -> None:
    """Wait for the pull that ends next."""
    while True:
        for each in service.take_reports(is_idle=True):
            if each.kind is KvReportKind.PULLED:
                assert not each.failed.size, each.name
                return


def make_copy(num_bytes: int) -> Callable[[], Seconds]:
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    target = np.ones_like(source)
    return lambda: timed(lambda: np.copyto(target, source))


@contextmanager
def open_tcp(num_bytes: int, key: bytes) -> Iterator[Callable[[], Seconds]]:
    """Yield a function that returns the time in which another process sends so many bytes over TCP.

    Args:
        key: with which they are encrypted as blocks are; empty for plain bytes.
    """
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        sender = spawn.Process(target=send, args=(server.getsockname()[1], num_bytes, key))
        sender.start()
        connection, _ = server.accept()
    target = memoryview(bytearray(b"1") * num_bytes)

    def receive() -> None:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(b"!")
        start = 0
        while start < num_bytes:
            start += connection.recv_into(target[start : start + READ_BYTES])

    with connection:
        stream = SealedStream(connection, key, is_server=False, max_bytes=READ_BYTES) if key else None

        def receive_encrypted() -> None:
            assert stream is not None
            stream.send(b"!", TIMEOUT_S)
            for _ in range(num_bytes // READ_BYTES):
                assert stream.receive(TIMEOUT_S) is not None

        yield lambda: timed(receive if stream is None else receive_encrypted, sender.pid)
    sender.join()


def send(port: int, num_bytes: int, key: bytes) -> None:
    """Send bytes whenever the other end asks, until it has closed the connection."""
    content = memoryview(bytearray(b"1") * num_bytes)
    parts = [content[start : start + READ_BYTES] for start in range(0, num_bytes, READ_BYTES)]
    with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ConnectionError):
        stream = SealedStream(connection, key, is_server=True, max_bytes=READ_BYTES) if key else None
        while connection.recv(1) if stream is None else stream.receive(TIMEOUT_S):
            for part in parts:
                connection.sendall(part) if stream is None else stream.send(part, TIMEOUT_S)


if __name__ == "__main__":
    main()
