"""A server with --kv-disk that is killed and started again finds the prefixes of the one before, on all ranks."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import READY_TIMEOUT_S

from quire import Client
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.client.wire.status import ReplicaInfo
from quire.proto.replica_status import KvCacheInfo

pytestmark = pytest.mark.cluster

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom, " * 3


def start(place: Path, key: Path) -> ServerProcess:
    server = ServerProcess(
        "demo", "--tensor-parallel-size", "2", "--kv-disk", f"{place}:64MiB", "--kv-key", str(key), "--audit"
    )
    try:
        server.wait_ready(READY_TIMEOUT_S)
    except BaseException:
        server.close()
        raise
    return server


def complete(server: ServerProcess, **more: Any) -> tuple[str, int, int]:
    """Return the text of a completion, its cached tokens and those of its prompt."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{server.http_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
        answer = json.load(response)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0), usage["prompt_tokens"]


def kill(server: ServerProcess) -> None:
    """Kill every process of a server at once, as a power switch does."""
    main = psutil.Process(server.process.pid)
    for process in (main, *main.children(recursive=True)):
        process.kill()


def wait_for_kv(server: ServerProcess, holds: Callable[[KvCacheInfo], bool]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not holds(kv := status_of(server).kv):
        assert time.monotonic() < deadline, kv
        time.sleep(0.2)


def wait_for_blocks(server: ServerProcess, num_blocks: int) -> None:
    """Wait until all ranks have so many blocks in files."""
    wait_for_kv(server, lambda kv: kv.num_disk_blocks >= num_blocks)


def complete_with_stored(server: ServerProcess, num_blocks: int) -> str:
    """Return the text of a completion that has at least so many blocks from the disk.

    A rank that has to wait for a processor reads too late: then the request computes its blocks.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(server.address) as client:
        while True:
            client.flush_cache()
            text, num_cached, _ = complete(server)
            if num_cached >= 16 * num_blocks:
                return text
            assert time.monotonic() < deadline, f"{num_cached} tokens were cached"


def status_of(server: ServerProcess) -> ReplicaInfo:
    with Client(server.address) as client:
        (replica,) = client.status()
        return replica


def test_killed_server_finds_its_prefixes(tmp_path: Path) -> None:
    place, key = tmp_path / "kv", tmp_path / "key"
    server = start(place, key)
    try:
        text, num_cached, num_tokens = complete(server)
        assert num_cached == 0
        num_blocks = num_tokens // 16
        wait_for_blocks(server, num_blocks)
        kill(server)
    finally:
        server.close()

    server = start(place, key)
    try:
        wait_for_blocks(server, num_blocks)
        assert complete(server, cache_salt="another tenant's") == (text, 0, num_tokens)
        assert complete_with_stored(server, (num_tokens - 1) // 16 - 1) == text
        wait_for_kv(server, lambda kv: kv.num_read_blocks > 0)
        assert status_of(server).kv.num_corrupt_blocks == 0
        kill(server)
    finally:
        server.close()

    for path in place.glob("quire-kv/*/*.kv"):  # a byte of each block, on both ranks
        raw = bytearray(path.read_bytes())
        raw[4096::512] = bytes(byte ^ 1 for byte in raw[4096::512])
        path.write_bytes(raw)
    server = start(place, key)
    try:
        wait_for_blocks(server, num_blocks)
        assert complete(server) == (text, 0, num_tokens)
        wait_for_kv(server, lambda kv: kv.num_corrupt_blocks > 0)
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log
    finally:
        server.close()
