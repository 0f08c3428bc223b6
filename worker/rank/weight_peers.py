"""Weights over the network: a rank serves its segments of weights, and a rank of another replica copies one.

A segment has the weights packed for the processor, so that a copy needs no packing either. The connection is that of
KV blocks, see `SealedPort`. Nothing is sent before the identities of the weights were compared, which name files,
settings and layout; what has come is compared with the checksum of each tensor. A copy that fails, or that takes
longer than the files would by the rates measured meanwhile, is given up: the files are read.

Through the same port a rank passes on the pieces of its node's copy of the files (`node_copy`), for which it need not
have loaded anything.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto.errors import in_one_line
from ..memory.shared_segment import SegmentAddress, SharedSegment
from ..weights.node_cache import NodeCache
from ..weights.weight_segment import PURPOSE, difference, read_table
from ..weights.weight_source import WeightSource

if TYPE_CHECKING:
    from ..transfer.messages import StreamOffer
    from ..transfer.sealed_port import SealedPort
    from ..transfer.sealed_stream import SealedStream

# Bytes of a request, of which two are under way.
CHUNK_BYTES = 4 << 20
_MAX_FRAME_BYTES = 16 << 20
# After so many bytes the rate of the connection is known.
TRIAL_BYTES = 64 << 20
# A peer that sends nothing for so long is given up, and so is a reader that takes nothing. A copy may take as long,
# or as long as the files would.
SILENCE_S = 5.0
# A peer whose node's copy has not got a piece for so long is given up.
PIECE_TIMEOUT_S = 10.0
# The server looks so often whether another process has got a piece, and answers after so long in any case.
_PIECE_INTERVAL_S, _PIECE_WAIT_S = 0.02, 1.0
# Models that a rank may load: that which is served, and one that drafts.
_NUM_MODELS = 2
# Parts of the files that are read to measure their rate.
_NUM_SAMPLES, _SAMPLE_BYTES = 4, 4 << 20
# Start and length.
_REQUEST = struct.Struct("<QQ")

_log = logging.getLogger(__name__)


class WeightServer:
    """Serves a rank's segments of weights, and its node's copies. Its port is opened by the first reader.

    Args:
        owner: for messages of the readers.
        may_copy: returns whether the node may still begin a copy that it lacks.
    """

    def __init__(self, owner: str, may_copy: Callable[[], bool] = lambda: False) -> None:
        self._owner, self._may_copy = owner, may_copy
        self._lock = threading.Lock()  # guards what follows
        self._port: SealedPort | None = None
        self._segments: tuple[SegmentAddress, ...] = ()

    def source(self, segments: Sequence[SegmentAddress], host: str | None) -> WeightSource:
        """Return a source for one reader.

        Args:
            segments: of the weights in use.
            host: this host's address for readers of other hosts; None for readers of this one.
        """
        with self._lock:
            self._segments = tuple(segments)
            if host is None or not segments:
                return WeightSource(self._owner, self._segments)
            offers = self._offers(host, len(segments))
        credentials = tuple((offer.token, offer.key) for offer in offers)
        return WeightSource(self._owner, self._segments, host, offers[0].port, credentials)

    def copies(self, host: str, node: str, num_readers: int) -> tuple[WeightSource, ...] | None:
        """Return a source of this node's copies for each reader; None if this node has no cache."""
        if NodeCache.of_environment() is None:
            return None
        with self._lock:
            offers = self._offers(host, num_readers * _NUM_MODELS)
        pairs = [(offer.token, offer.key) for offer in offers]
        return tuple(
            WeightSource(self._owner, (), host, offers[0].port, tuple(pairs[reader::num_readers]), node)
            for reader in range(num_readers)
        )

    def close(self) -> None:
        """Serve no more. Safe to call twice."""
        with self._lock:
            port, self._port = self._port, None
        if port is not None:
            port.close()

    def _offers(self, host: str, count: int) -> list[StreamOffer]:
        # Only ranks whose weights travel need its cipher.
        from ..transfer.sealed_port import SealedPort

        if self._port is None:
            self._port = SealedPort(host, self._serve, _MAX_FRAME_BYTES)
        return [self._port.offer() for _ in range(count)]

    def _serve(self, stream: SealedStream) -> None:
        """Answer with pieces of copies, or the parts of the segment that a reader names, until it has ended."""
        frame = stream.receive(SILENCE_S)
        if frame is None:
            return
        request = json.loads(bytes(frame))
        if "copy" in request:
            self._serve_pieces(stream, request)
        else:
            self._serve_segment(stream, request)

    def _serve_pieces(self, stream: SealedStream, request: Mapping[str, Any]) -> None:
        while True:
            answer, content = self._find_piece(request["copy"], request["piece"])
            stream.send(json.dumps(answer).encode(), SILENCE_S)
            if content:
                stream.send(content, SILENCE_S)
            # The reader writes a piece and may wait for others meanwhile.
            frame = stream.receive(PIECE_TIMEOUT_S)
            if frame is None:
                return
            request = json.loads(bytes(frame))

    def _find_piece(self, key: str, piece: int) -> tuple[dict[str, Any], bytes]:
        """Return the answer and the piece, which another process may write meanwhile."""
        cache, deadline = NodeCache.of_environment(), time.monotonic() + _PIECE_WAIT_S
        if cache is None:
            return {"problem": "its node has no cache"}, b""
        try:
            while (found := cache.read_piece(key, piece)) is None:
                if not self._may_copy():
                    return {"problem": "its node has no copy"}, b""
                if time.monotonic() > deadline:
                    return {"wait": True}, b""
                time.sleep(_PIECE_INTERVAL_S)
        except (OSError, ValueError) as error:
            return {"problem": in_one_line(error)}, b""
        return {"checksum": found[0]}, found[1]

    def _serve_segment(self, stream: SealedStream, identity: Mapping[str, Any]) -> None:
        segment, answer = self._find(identity)
        if segment is None:
            stream.send(json.dumps(answer).encode(), SILENCE_S)
            return
        with closing(segment):
            stream.send(json.dumps(answer).encode(), SILENCE_S)
            content = memoryview(segment.map_private())
            while (frame := stream.receive(SILENCE_S)) is not None:
                start, length = _REQUEST.unpack(frame)
                stream.send(content[start : start + min(length, CHUNK_BYTES)], SILENCE_S)

    def _find(self, identity: Mapping[str, Any]) -> tuple[SharedSegment | None, dict[str, Any]]:
        """Return the segment with these weights and its length, or None and why there is none."""
        problem = "it has no weights"
        for address in self._segments:
            try:
                segment = SharedSegment.open(address)
            except OSError as error:
                problem = in_one_line(error)
                continue
            try:
                table = read_table(segment.map_private())
                if table["identity"] == identity:
                    return segment, {"num_bytes": address.num_bytes, "packing_s": table["packing_s"]}
                problem = difference(table["identity"], identity)
            except (OSError, ValueError) as error:
                problem = in_one_line(error)
            segment.close()
        return None, {"problem": problem}


def copy_segment(
    source: WeightSource, identity: Mapping[str, Any], folder: Path, num_ranks: int
) -> SharedSegment | None:
    """Return a sealed copy of a peer's segment. Returns None, and logs why, if the files are to be read.

    Args:
        folder: of the files.
        num_ranks: ranks that share them.
    """
    started = time.monotonic()
    try:
        segment = _copy(source, identity, folder, num_ranks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the weights of %s are not copied: %s", source.owner, in_one_line(error))
        return None
    seconds = time.monotonic() - started
    gigabytes = segment.num_bytes / 1e9
    _log.info("copied %.2f GB of weights of %s, at %.2f GB/s", gigabytes, source.owner, gigabytes / seconds)
    return segment


def _connect(source: WeightSource) -> SealedStream:
    from ..transfer.messages import StreamOffer
    from ..transfer.sealed_port import connect_stream

    if not source.credentials:
        raise ConnectionError(f"{source.owner} has offered no more connections")
    offer = StreamOffer(source.port, *source.credentials[0])
    stream = connect_stream(source.host, offer, _MAX_FRAME_BYTES)
    if stream is None:
        raise ConnectionError(f"{source.host}:{source.port} cannot be connected")
    return stream


class PieceStream:
    """The PieceReader of a rank on another node.

    Raises:
        ConnectionError: it cannot be connected.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source, self._stream = source, _connect(source)

    def fetch(self, key: str, piece: int) -> tuple[int, memoryview]:
        request, deadline = (
            json.dumps({"copy": key, "piece": piece}).encode(),
            time.monotonic() + PIECE_TIMEOUT_S,
        )
        while time.monotonic() < deadline:
            self._stream.send(request, SILENCE_S)
            answer = json.loads(bytes(_next_frame(self._stream, self._source, SILENCE_S)))
            if "problem" in answer:
                raise ValueError(answer["problem"])
            if "wait" not in answer:
                return int(answer["checksum"]), _next_frame(self._stream, self._source, SILENCE_S)
        raise TimeoutError(f"{self._source.owner} has not had piece {piece} in {PIECE_TIMEOUT_S:g} s")

    def close(self) -> None:
        self._stream.close()


def _copy(source: WeightSource, identity: Mapping[str, Any], folder: Path, num_ranks: int) -> SharedSegment:
    with closing(_connect(source)) as stream:
        stream.send(json.dumps(identity).encode(), SILENCE_S)
        answer = json.loads(bytes(_next_frame(stream, source, SILENCE_S)))
        if "problem" in answer:
            raise ValueError(answer["problem"])
        num_bytes, packing_s = int(answer["num_bytes"]), float(answer["packing_s"])
        segment = SharedSegment.create(PURPOSE, num_bytes)
        try:
            _fill(segment, stream, source, num_bytes, packing_s + seconds_to_read(folder, num_ranks))
            segment.seal(num_bytes)
        except BaseException:
            segment.close()
            raise
    return segment


def _fill(
    segment: SharedSegment, stream: SealedStream, source: WeightSource, num_bytes: int, files_s: float
) -> None:
    """Write what the peer sends. Raises ValueError once that will take longer than the files, or OSError."""
    started, longest_s = time.monotonic(), max(SILENCE_S, files_s)
    starts = range(0, num_bytes, CHUNK_BYTES)
    requests = iter(starts)
    for start in (next(requests, None), next(requests, None)):
        _request(stream, start)
    for start in starts:
        _request(stream, next(requests, None))
        left_s = started + longest_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{source.owner} has sent {start} of {num_bytes} bytes in {longest_s:.1f} s")
        content = _next_frame(stream, source, min(SILENCE_S, left_s))
        if len(content) != min(CHUNK_BYTES, num_bytes - start):
            raise ValueError(f"{source.owner} sent {len(content)} bytes at {start}")
        segment.write(content, start)
        end = start + len(content)
        expected_s = (time.monotonic() - started) * num_bytes / end
        if end >= TRIAL_BYTES and expected_s > files_s:
            raise ValueError(f"the copy would take {expected_s:.1f} s, the files {files_s:.1f} s")


def _request(stream: SealedStream, start: int | None) -> None:
    if start is not None:
        stream.send(_REQUEST.pack(start, CHUNK_BYTES), SILENCE_S)


def _next_frame(stream: SealedStream, source: WeightSource, timeout_s: float) -> memoryview:
    frame = stream.receive(timeout_s)
    if frame is None:
        raise TimeoutError(f"{source.owner} has not sent what was asked for in {timeout_s:.1f} s")
    return frame


def seconds_to_read(folder: Path, num_ranks: int) -> float:
    """Return the seconds that a rank needs to read its part of the weights, by reading some of them."""
    files = {path: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    total, num_read, started = sum(files.values()), 0, time.monotonic()
    for sample in range(_NUM_SAMPLES):
        place = total * sample // _NUM_SAMPLES
        for path, size in files.items():
            if place < size:
                with path.open("rb", buffering=0) as file:
                    file.seek(place)
                    num_read += len(file.read(_SAMPLE_BYTES))
                break
            place -= size
    seconds = time.monotonic() - started
    return seconds * total / max(1, num_read * num_ranks)
