"""Rates at which one process reads the KV blocks of another one, beside a plain socket and a copy of memory.

    python -m benchmarks.kv_transfer --json FILE

A lender and a reader with a rank each, 32 layers of 8 heads of 128 numbers in bfloat16, 64 KiB per layer and block.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
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
from quire.worker.memory.cache_engine import CacheEngine
from quire.worker.transfer import peers
from quire.worker.transfer.kv_blocks import KvBlocks
from quire.worker.transfer.messages import READ_BYTES
from quire.worker.transfer.process_memory import ProcessMemory
from quire.worker.transfer.service import KvService

NUM_BLOCKS, NUM_LAYERS, REPEATS = 129, 32, 9
WAYS = {
    "memory": "the reader copies from the lender's memory, on one host",
    "buffer": "the lender copies into shared memory, on one host",
    "stream": "AES-GCM over TCP",
    "frames": "ZeroMQ's CURVE over TCP",
}
CPU = torch.device("cpu")
TIMEOUT_S = 120.0


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    num_bytes = (NUM_BLOCKS - 1) * sum(layout_of(make_config(), 0, "").block_bytes)
    note = f"{num_bytes >> 20} MiB, one sequence's blocks at once, best of {REPEATS}"
    figures = {
        "kv_transfer.memcpy": Figure(num_bytes / copy_seconds(num_bytes) / 1e9, "GB/s", note),
        "kv_transfer.tcp_plain": Figure(num_bytes / socket_seconds(num_bytes) / 1e9, "GB/s", note),
    }
    for name, keys in (
        ("memory", None),
        ("buffer", None),
        ("stream", CurveKeys.generate()),
        ("frames", CurveKeys.generate()),
    ):
        seconds = min(pull_seconds(name, keys))
        figures[f"kv_transfer.{name}"] = Figure(num_bytes / seconds / 1e9, "GB/s", WAYS[name])
    report(figures, arguments.json)


def make_config() -> EngineConfig:
    model = ModelConfig(
        path="", name="kv", architecture="", hf={}, dtype="bfloat16", max_model_len=4096, vocab_size=8,
        num_layers=NUM_LAYERS, num_heads=8, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    config = engine_config(EngineOptions("kv", num_kv_blocks=NUM_BLOCKS), model)
    return replace(config, cache=replace(config.cache, kv_transfer=True))


def make_service(keys: CurveKeys | None, directory: str, name: str) -> KvService:
    config = make_config()
    cache = CacheEngine(config, NUM_BLOCKS, 0, torch.bfloat16, CPU)
    blocks = KvBlocks(cache, config.cache_layout, layout_of(config, 0, "w"), CPU)
    endpoint = f"ipc://{directory}/{name}.kv" if keys is None else "tcp://127.0.0.1:*"
    return KvService(blocks, "w", endpoint, keys, lambda body: body())


def lend(keys: CurveKeys | None, directory: str, channel: Connection) -> None:
    """Lend all blocks, in a process of its own."""
    torch.set_num_threads(1)
    service = make_service(keys, directory, "lender")
    service.apply(KvOrders(grants=(KvGrant(1, np.arange(1, NUM_BLOCKS, dtype=np.int32)),)))
    channel.send(service.take_reports(is_idle=False)[0].name)
    channel.recv()
    service.close()


def pull_seconds(way: str, keys: CurveKeys | None) -> list[float]:
    """Return the seconds of some pulls of all blocks, which come by one of the ways."""
    torch.set_num_threads(1)
    seconds = list[float]()
    with ExitStack() as stack:
        if way != "memory":  # as from a GPU, or from another host
            stack.enter_context(mock.patch.object(ProcessMemory, "open", return_value=None))
        if way in ("stream", "frames"):
            stack.enter_context(mock.patch.object(peers._Buffer, "address", return_value=None))
        if way == "frames":
            stack.enter_context(mock.patch.object(peers, "_connect_stream", return_value=None))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        spawn = multiprocessing.get_context("spawn")
        own, others = spawn.Pipe()
        lender = spawn.Process(target=lend, args=(keys, directory, others))
        lender.start()
        stack.callback(lender.join)
        stack.callback(own.send, None)
        if not own.poll(TIMEOUT_S):
            raise TimeoutError(f"the lender did not start in {TIMEOUT_S:g} s")
        endpoint = own.recv()
        service = make_service(keys, directory, "reader")
        stack.callback(service.close)
        ids = np.arange(1, NUM_BLOCKS, dtype=np.int32)
        for number in range(1, REPEATS + 1):
            order = KvPull(number, 1, (endpoint,), np.array([ids.size], np.int32), ids, ids, TIMEOUT_S)
            service.apply_pulls(KvOrders(pulls=(order,)))
            seconds.append(await_pull(service))
    return seconds


def await_pull(service: KvService) -> float:
    """Return the seconds of the pull that ends next."""
    while True:
        for each in service.take_reports(is_idle=True):
            if each.kind is KvReportKind.PULLED:
                assert not each.failed.size, each.name
                return each.seconds


def copy_seconds(num_bytes: int) -> float:
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    target = np.empty_like(source)
    return min([timed(lambda: np.copyto(target, source)) for _ in range(REPEATS)])


def socket_seconds(num_bytes: int) -> float:
    """Return the seconds in which another process sends so many bytes over a plain TCP connection."""
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        sender = spawn.Process(target=send_plain, args=(server.getsockname()[1], num_bytes))
        sender.start()
        connection, _ = server.accept()
    target = memoryview(bytearray(num_bytes))

    def receive() -> None:
        connection.sendall(b"!")
        start = 0
        while start < num_bytes:
            start += connection.recv_into(target[start : start + READ_BYTES])

    with connection:
        seconds = min([timed(receive) for _ in range(REPEATS)])
    sender.join()
    return seconds


def send_plain(port: int, num_bytes: int) -> None:
    content = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            for start in range(0, num_bytes, READ_BYTES):
                connection.sendall(content[start : start + READ_BYTES])


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
