"""A process that stands for a node: it copies a model to a folder of its own, and serves the copy until it is killed.

The first line of its input is a pickled Node in base64. It prints a source for each reader, reads a pickled NodePeers
and copies, and prints how; each of these is a line.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.worker.rank import weight_peers
from quire.worker.rank.weight_peers import PieceStream, WeightServer
from quire.worker.weights import node_cache, node_copy
from quire.worker.weights.node_cache import FOLDER_VARIABLE, weights_folder
from quire.worker.weights.weight_source import NodePeers, WeightSource

START_TIMEOUT_S = 120.0
COPY_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Node:
    """Settings of the process.

    Attributes:
        piece_s: seconds of each read of a piece of the source.
        stops_at: after so many pieces it reads no more of the source, until the file `go` exists.
        wrong_piece: is served with other bytes than it has.
        max_pieces: after so many pieces it sends no more, and keeps its connections.
        send_s: seconds before it sends a piece.
    """

    name: str
    cache: Path
    source: Path
    num_readers: int
    piece_bytes: int
    piece_s: float = 0.0
    stops_at: int | None = None
    wrong_piece: int | None = None
    max_pieces: int | None = None
    send_s: float = 0.0
    trial_s: float = 60.0
    silence_s: float = 60.0
    piece_timeout_s: float = 60.0

    @property
    def go(self) -> Path:
        return self.cache.with_suffix(".go")


@dataclass(frozen=True)
class Copied:
    """Report of a copy.

    Attributes:
        pieces: of the source that the process has read, by the path of its descriptors.
    """

    folder: Path
    pieces: list[tuple[str, int]]
    log: str


@dataclass
class CopyNode:
    """The running process."""

    process: subprocess.Popen[bytes]
    sources: list[WeightSource]
    node: Node

    def begin(self, peers: NodePeers) -> None:
        _send(self.process, peers)

    def result(self) -> Copied:
        found = json.loads(_read_line(self.process, COPY_TIMEOUT_S))
        return Copied(
            Path(found["folder"]), [(name, offset) for name, offset in found["pieces"]], found["log"]
        )

    def num_copied(self) -> int:
        """Return the pieces that its copy has so far."""
        tables = [*self.node.cache.glob(".*.incoming/PIECES"), *self.node.cache.glob("*/PIECES")]
        records = tables[0].read_bytes() if tables else b""
        return sum(records[at] for at in range(0, len(records), 16))

    def wait_for(self, num_pieces: int) -> None:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while self.num_copied() < num_pieces:
            assert time.monotonic() < deadline, f"{self.node.name} has {self.num_copied()} pieces"
            time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def copy_node(node: Node) -> Iterator[CopyNode]:
    """Start the process; it copies from `begin` on."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            _send(process, node)
            sources = pickle.loads(base64.b64decode(_read_line(process, START_TIMEOUT_S)))  # noqa: S301
            yield CopyNode(process, list(sources), node)
        finally:
            process.kill()


def _send(process: subprocess.Popen[bytes], content: object) -> None:
    assert process.stdin is not None
    process.stdin.write(base64.b64encode(pickle.dumps(content)) + b"\n")
    process.stdin.flush()


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
    finally:
        watchdog.cancel()
    assert line, "the process has ended"
    return line


def _record_reads(node: Node) -> list[tuple[str, int]]:
    """Record the reads of the source from now on, by the files that are open."""
    pieces, read = list[tuple[str, int]](), os.preadv

    def record(fd: int, buffers: list[Any], offset: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.parent == node.source:
            time.sleep(node.piece_s)
            pieces.append((path.name, offset))
            while node.stops_at is not None and len(pieces) > node.stops_at and not node.go.exists():
                time.sleep(0.01)
        return read(fd, buffers, offset)

    os.preadv = record  # type: ignore[assignment]
    return pieces


def _misbehave(node: Node) -> None:
    find, num_sent = WeightServer._find_piece, list[int]()

    def find_wrong(self: WeightServer, key: str, piece: int) -> tuple[dict[str, Any], bytes]:
        answer, content = find(self, key, piece)
        time.sleep(node.send_s)
        if content:
            num_sent.append(piece)
        if node.max_pieces is not None and len(num_sent) > node.max_pieces:
            threading.Event().wait()
        return answer, bytes(len(content)) if piece == node.wrong_piece else content

    WeightServer._find_piece = find_wrong  # type: ignore[method-assign]


def main() -> None:
    node: Node = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))  # noqa: S301
    logging.basicConfig(level=logging.INFO, stream=(log := _Log()))
    os.environ[FOLDER_VARIABLE] = str(node.cache)
    node_copy.PIECE_BYTES, node_copy.TRIAL_S = node.piece_bytes, node.trial_s
    node_cache._device_of = lambda path: 1 if path == node.cache else 2
    weight_peers.SILENCE_S, weight_peers.PIECE_TIMEOUT_S = node.silence_s, node.piece_timeout_s
    _misbehave(node)
    pieces = _record_reads(node)
    is_loaded = threading.Event()
    server = WeightServer(node.name, lambda: not is_loaded.is_set())
    print(
        base64.b64encode(pickle.dumps(server.copies("127.0.0.1", node.name, node.num_readers))).decode(),
        flush=True,
    )
    peers: NodePeers = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))  # noqa: S301
    folder = weights_folder(str(node.source), peers, PieceStream)
    is_loaded.set()
    print(json.dumps({"folder": str(folder), "pieces": pieces, "log": "".join(log.lines)}), flush=True)
    threading.Event().wait()


class _Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> None:
        self.lines.append(line)

    def flush(self) -> None:
        pass


if __name__ == "__main__":
    main()
