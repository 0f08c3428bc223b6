"""NodeCopy: a copy of a model's files that is filled in pieces, from the source and from the copies of other nodes.

The nodes of a replica divide the pieces: each reads its part from the source, and the others' parts from their copies
while these are being filled. Between replicas, a later one reads the copy of an earlier one. A piece travels with the
checksum of what was read from the source. A peer that is silent, slow or wrong is given up, and the source is read.

Beside the files lies a table with a record for each piece: its checksum, and whether it is there. So every process of
a node can pass the pieces on, also while another one fills the copy.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from ...proto.errors import in_one_line
from ..memory.checksum import checksum
from .weight_source import NodePeers, WeightSource

PIECE_BYTES = 4 << 20
# Pieces in a row that one node reads from the source: storage reads ahead.
MAX_RUN_PIECES = 16
# Network storage is faster with several readers.
NUM_READERS = 4
# A peer is judged by its rate after so long. It is too slow if the rest would take twice as long as from the source,
# and so much longer.
TRIAL_S = 5.0
PIECES = "PIECES"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Whether a piece is there, and its checksum.
_RECORD = struct.Struct("<QQ")
_SOURCE, _EARLIER = "the source", "earlier replicas"

_log = logging.getLogger(__name__)


class CopyFailed(Exception):
    """The weights are not copied; the message says why."""


class PieceReader(Protocol):
    """A connection to the node of a peer."""

    def fetch(self, key: str, piece: int) -> tuple[int, memoryview]:
        """Return the checksum and the content of a piece, valid until the next call.

        Raises:
            OSError: the peer has ended, or has not had the piece in time; names the peer.
            ValueError: it has no copy, or its answer has another form.
        """
        ...

    def close(self) -> None: ...


# Opens a connection; raises OSError.
Connect = Callable[[WeightSource], PieceReader]


def weight_files(folder: Path) -> dict[str, int]:
    """Return the name |-> number of bytes of the files of a copy."""
    paths = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    return {path.name: path.stat().st_size for path in paths}


class _Pieces:
    """The pieces of files, numbered through all of them."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self.names, self.sizes = list(files), list(files.values())
        self._ends = list(accumulate(-(-size // PIECE_BYTES) for size in self.sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, piece: int) -> tuple[int, int, int]:
        """Return the index of the file of a piece, its begin in it, and its length."""
        file = bisect_right(self._ends, piece)
        offset = (piece - (self._ends[file - 1] if file else 0)) * PIECE_BYTES
        return file, offset, min(PIECE_BYTES, self.sizes[file] - offset)

    def of_file(self, file: int) -> range:
        return range(self._ends[file - 1] if file else 0, self._ends[file])


def read_piece(folder: Path, piece: int) -> tuple[int, bytes] | None:
    """Return the checksum and the content of a piece of a copy; None if it is not there, or not yet.

    Raises:
        ValueError: the copy has no piece of this number.
    """
    try:
        with (folder / PIECES).open("rb", buffering=0) as table:
            pieces = _Pieces(weight_files(folder))
            if not pieces.names:
                return None
            if not 0 <= piece < len(pieces):
                raise ValueError(f"piece {piece} of {len(pieces)} was asked for")
            record = os.pread(table.fileno(), _RECORD.size, piece * _RECORD.size)
        is_there, expected = _RECORD.unpack(record)
        if not is_there:
            return None
        file, offset, length = pieces.place(piece)
        with (folder / pieces.names[file]).open("rb", buffering=0) as own:
            return expected, os.pread(own.fileno(), length, offset)
    except (FileNotFoundError, struct.error):  # renamed, deleted, or not begun
        return None


class NodeCopy:
    """A copy that is being filled.

    Args:
        folder: of the copy; empty.
        files: name |-> number of bytes of the source's files.
        key: of the copy, by which peers find theirs.
        connect: opens a connection to a peer.

    Attributes:
        num_source_bytes: bytes read from the source so far.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        files: Mapping[str, int],
        key: str,
        peers: NodePeers,
        connect: Connect,
    ) -> None:
        self._folder, self._source, self._key, self._connect = folder, source, key, connect
        self._pieces = _Pieces(files)
        self._peers = {_EARLIER: peers.earlier} | {each.owner: (each,) for each in peers.fellows}
        self._lanes = _Lanes(_divide(len(self._pieces), peers))
        self._lock = threading.Lock()  # guards what follows
        self._num_left = [len(self._pieces.of_file(file)) for file in range(len(files))]  # by file
        self._checks: list[Future[tuple[str, str]]] = []
        self.num_source_bytes, self._num_source_pieces, self._source_s = 0, 0, 0.0

    def fill(self) -> dict[str, str]:
        """Copy all files, and read them back from the disk. Returns name |-> SHA-256.

        Raises:
            OSError: a file cannot be read or written.
            CopyFailed: the disk holds other bytes than were written, or a file has ended early.
        """
        with ExitStack() as stack:
            self._sources, self._targets = (
                [stack.enter_context((folder / name).open(mode, buffering=0)) for name in self._pieces.names]
                for folder, mode in ((self._source, "rb"), (self._folder, "x+b"))
            )
            for target, size in zip(self._targets, self._pieces.sizes, strict=True):
                target.truncate(size)
            # After the files: with it the copy is open to readers.
            self._table = stack.enter_context((self._folder / PIECES).open("x+b", buffering=0))
            self._table.truncate(len(self._pieces) * _RECORD.size)
            fetching = [lane for lane in self._lanes.names if lane != _SOURCE]
            with (
                ThreadPoolExecutor(NUM_READERS, "check-copy") as self._checkers,
                ThreadPoolExecutor(NUM_READERS + len(fetching), "copy") as threads,
            ):
                for file, num_left in enumerate(self._num_left):
                    if not num_left:
                        self._checks.append(self._checkers.submit(self._check, file))
                work = [threads.submit(self._run, self._read_source) for _ in range(NUM_READERS)]
                work += [threads.submit(self._run, partial(self._fetch, lane)) for lane in fetching]
                for each in work:
                    each.result()
            return dict(check.result() for check in self._checks)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._lanes.stop()
            raise

    def _read_source(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while (piece := self._lanes.take(_SOURCE)) is not None:
            file, offset, length = self._pieces.place(piece)
            started, content = time.monotonic(), buffer[:length]
            rest = content
            while rest:
                count = os.preadv(self._sources[file].fileno(), [rest], offset + length - len(rest))
                if not count:
                    raise CopyFailed(f"{self._source / self._pieces.names[file]} has become shorter")
                rest = rest[count:]
            with self._lock:
                self.num_source_bytes += length
                self._num_source_pieces += 1
                self._source_s += time.monotonic() - started
            self._store(piece, content, checksum(np.frombuffer(content, np.uint8)))

    def _fetch(self, lane: str) -> None:
        """Fetch the pieces of a lane from its peers, and leave to the source what none of them has sent."""
        for peer in self._peers[lane]:
            try:
                with closing(self._connect(peer)) as reader:
                    self._fetch_from(reader, peer, lane)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("the copy of %s is read no further: %s", peer.owner, in_one_line(error))
            else:
                return
        self._lanes.leave_to_source(lane)

    def _fetch_from(self, reader: PieceReader, peer: WeightSource, lane: str) -> None:
        started, num_fetched = time.monotonic(), 0
        while (piece := self._lanes.take(lane)) is not None:
            try:
                expected, content = reader.fetch(self._key, piece)
                _, _, length = self._pieces.place(piece)
                if len(content) != length or checksum(np.frombuffer(content, np.uint8)) != expected:
                    raise ValueError(f"piece {piece} of {peer.owner} is not what was read from the source")
                self._store(piece, content, expected)
                num_fetched += 1
            except BaseException:
                self._lanes.put_back(lane, piece)
                raise
            self._check_rate(
                peer, self._lanes.num_left(lane), (time.monotonic() - started) / num_fetched, started
            )

    def _check_rate(self, peer: WeightSource, num_left: int, piece_s: float, started: float) -> None:
        """Raise TimeoutError if the source would send the rest much faster than a peer."""
        with self._lock:
            num_read, source_s = self._num_source_pieces, self._source_s
        if not num_read or time.monotonic() - started < TRIAL_S:
            return
        source_s *= num_left / num_read / min(NUM_READERS, num_read)
        if num_left * piece_s > 2 * source_s + TRIAL_S:
            raise TimeoutError(
                f"{peer.owner} would take {num_left * piece_s:.1f} s for the rest, the source {source_s:.1f} s"
            )

    def _store(self, piece: int, content: memoryview, own_checksum: int) -> None:
        file, offset, _ = self._pieces.place(piece)
        _write(self._targets[file].fileno(), content, offset)
        # In this order: a reader that finds the piece there finds its checksum.
        place = piece * _RECORD.size
        _write(self._table.fileno(), memoryview(_RECORD.pack(0, own_checksum)), place)
        _write(self._table.fileno(), memoryview(_RECORD.pack(1, own_checksum)), place)
        with self._lock:
            self._num_left[file] -= 1
            if not self._num_left[file]:
                self._checks.append(self._checkers.submit(self._check, file))
        self._lanes.finish()

    def _check(self, file: int) -> tuple[str, str]:
        """Read a file back from the disk; return its name and its SHA-256. Raises CopyFailed."""
        name, fd, digest = self._pieces.names[file], self._targets[file].fileno(), hashlib.sha256()
        os.fsync(fd)
        # Drops the pages from memory, so that they are read from the disk.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in self._pieces.of_file(file):
            _, offset, length = self._pieces.place(piece)
            stored = os.pread(fd, length, offset)
            digest.update(stored)
            record = os.pread(self._table.fileno(), _RECORD.size, piece * _RECORD.size)
            if _RECORD.pack(1, checksum(np.frombuffer(stored, np.uint8))) != record:
                raise CopyFailed(f"{name} differs on the disk from what {self._source} had")
        return name, digest.hexdigest()


class _Lanes:
    """The pieces that are still to come, each in the lane of the one that is to send it."""

    def __init__(self, lanes: Mapping[str, Iterable[int]]) -> None:
        self._lanes = {name: deque(pieces) for name, pieces in lanes.items()}
        self._changed = threading.Condition()  # guards the lanes and what follows
        self._num_left = sum(map(len, self._lanes.values()))
        self._is_stopped = False

    @property
    def names(self) -> list[str]:
        return list(self._lanes)

    def take(self, lane: str) -> int | None:
        """Return the next piece of a lane; None if no more will come. That of the source waits for the others."""
        with self._changed:
            # The others end: each of their waits has a deadline.
            while not (self._is_stopped or self._lanes[lane]) and lane == _SOURCE and self._num_left:
                self._changed.wait()
            return None if self._is_stopped or not self._lanes[lane] else self._lanes[lane].popleft()

    def put_back(self, lane: str, piece: int) -> None:
        with self._changed:
            self._lanes[lane].appendleft(piece)

    def leave_to_source(self, lane: str) -> None:
        with self._changed:
            self._lanes[_SOURCE].extend(self._lanes[lane])
            self._lanes[lane].clear()
            self._changed.notify_all()

    def finish(self) -> None:
        """Count a piece that was taken and has come."""
        with self._changed:
            self._num_left -= 1
            if not self._num_left:
                self._changed.notify_all()

    def num_left(self, lane: str) -> int:
        with self._changed:
            return len(self._lanes[lane])

    def stop(self) -> None:
        """End all lanes, after an error."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


def _divide(num_pieces: int, peers: NodePeers) -> dict[str, list[int]]:
    """Return who sends this node which pieces."""
    others, num_nodes = peers.fellows, max(1, len(peers.fellows))
    run = max(1, min(MAX_RUN_PIECES, num_pieces // (4 * num_nodes)))
    own_lane = _EARLIER if peers.earlier else _SOURCE
    lanes: dict[str, list[int]] = {_SOURCE: [], own_lane: []}
    lanes |= {each.owner: [] for number, each in enumerate(others) if number != peers.own}
    for piece in range(num_pieces):
        node = piece // run % num_nodes
        lanes[own_lane if not others or node == peers.own else others[node].owner].append(piece)
    if peers.earlier and len(lanes[_EARLIER]) > 1:
        lanes[_SOURCE].append(lanes[_EARLIER].pop())  # by which the source's rate is known
    return lanes


def _write(fd: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(fd, content, offset)
        content, offset = content[count:], offset + count
