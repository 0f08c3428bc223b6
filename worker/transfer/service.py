"""KvService: one rank's part in KV that travels. It carries out the orders of plans, and reports.

The step thread applies orders and takes reports. The transport's thread serves leases, and another one pulls: neither
delays a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import SimpleQueue

import numpy as np
import zmq

from ...proto.block_tables import IntArray
from ...proto.errors import in_one_line
from ...proto.kv_transfer import KvFailure, KvOrders, KvPull, KvReport, KvReportKind
from ...proto.transport.network import CurveKeys
from .kv_blocks import Heads, KvBlocks, NoKvService, heads_to_read
from .messages import READS_AT_ONCE, KvReadError
from .transport import KvPeer, ZmqTransport

# A step without anything to compute waits this long for something to report: the scheduler plans such steps, one
# after the other, while leases or pulls are open.
IDLE_WAIT_S = 0.05
# A peer that does not answer for this long is given up.
SILENCE_S = 2.0
# Longest wait between two looks at whether a pull was canceled.
_LOOK_S = 0.1
# A lease that is read is renewed as often.
_RENEWAL_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenPull:
    """A pull whose end was not ordered yet."""

    order: KvPull
    canceled: threading.Event = field(default_factory=threading.Event)


class KvService:
    """Leases that a rank serves, and pulls that it makes.

    Args:
        weights: digest of the weights.
        endpoint, keys: as for ZmqTransport.
        run: runs the body of a thread, with the rank's device current.
        has_nixl: as for ZmqTransport.

    Raises:
        zmq.ZMQError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        weights: str,
        endpoint: str,
        keys: CurveKeys | None,
        run: Callable[[Callable[[], None]], None],
        *,
        has_nixl: bool = False,
    ) -> None:
        self._blocks, self._rank = blocks, blocks.layout.rank
        self._leases: dict[int, frozenset[int]] = {}  # generation |-> blocks
        self._renewed: dict[int, float] = {}  # generation |-> when that was last reported
        self._changed = threading.Condition()  # of leases
        self._reports = SimpleQueue[KvReport]()
        self._has_news = threading.Event()
        self._pulls: dict[int, _OpenPull] = {}
        self._orders = SimpleQueue[_OpenPull | tuple[str, int] | None]()
        self._closing = False
        self._transport = ZmqTransport(endpoint, keys, self, run, has_nixl=has_nixl)
        self._transport.register(blocks)
        self._report(
            KvReportKind.SERVES,
            name=self._transport.describe(),
            weights=weights,
            num_bytes=blocks.layout.state_bytes,
        )
        self._puller = threading.Thread(target=run, args=(self._pull_all,), name="kv-puller", daemon=True)
        self._puller.start()

    # The step thread

    def apply(self, orders: KvOrders | None) -> None:
        """Begin and end a plan's leases, before anything of the plan is written."""
        if orders is None:
            return
        with self._changed:
            for generation in orders.revoked.tolist():
                self._leases.pop(generation, None)
                self._renewed.pop(generation, None)
            if orders.grants:
                self._blocks.mark_written()
            for grant in orders.grants:
                self._leases[grant.generation] = frozenset(grant.block_ids.tolist())
            self._changed.notify_all()

    def apply_pulls(self, orders: KvOrders | None) -> None:
        """Begin and end a plan's pulls, after its moves: these save what the targets had."""
        if orders is None:
            return
        if orders.pulls:
            self._blocks.mark_written()
        for order in orders.pulls:
            pull = self._pulls[order.pull_id] = _OpenPull(order)
            self._orders.put(pull)
        for pull_id in orders.ended.tolist():
            ended = self._pulls.pop(pull_id, None)
            if ended is not None:
                ended.canceled.set()
                if self._rank == 0:
                    self._orders.put((ended.order.endpoints[0], ended.order.generation))

    def take_reports(self, *, is_idle: bool) -> tuple[KvReport, ...]:
        """Return what happened since the last call.

        Args:
            is_idle: the step computes nothing on any rank, so it waits a moment for a lease or a pull to end.
        """
        if is_idle and (self._leases or self._pulls):
            self._has_news.wait(IDLE_WAIT_S)
        self._has_news.clear()
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return tuple(reports)

    def close(self) -> None:
        """Serve and pull no more; when this returns, no thread uses the blocks. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        with self._changed:
            self._leases.clear()
            self._changed.notify_all()
        for pull in self._pulls.values():
            pull.canceled.set()
        self._pulls.clear()
        self._orders.put(None)
        self._puller.join()
        self._transport.close()

    # The transport's thread: LeaseTable

    def covers(self, generation: int, block_ids: IntArray, patience_s: float) -> bool:
        wanted = frozenset(block_ids.tolist())
        with self._changed:
            if patience_s:
                self._changed.wait_for(lambda: generation in self._leases or self._closing, patience_s)
            return wanted <= self._leases.get(generation, frozenset())

    def on_read(self, generation: int) -> None:
        now = time.monotonic()
        with self._changed:
            if generation in self._leases and now - self._renewed.get(generation, 0.0) >= _RENEWAL_S:
                self._renewed[generation] = now
                self._report(KvReportKind.RENEWED, generation)

    def on_release(self, generation: int) -> None:
        self._report(KvReportKind.RELEASED, generation)
        self._has_news.set()

    # The puller's thread

    def _pull_all(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, _OpenPull):
                self._pull(order)
            elif not self._closing:
                self._release(*order)

    def _pull(self, pull: _OpenPull) -> None:
        reader = _Reader(self._blocks, self._transport.connect, pull)
        try:
            problem = reader.read_all()
        except Exception as error:  # the sequence waits for a report
            _log.exception("rank %d could not pull blocks", self._rank)
            problem = f"{KvFailure.UNREACHABLE}: {in_one_line(error)}"
        failed, num_blocks = reader.failed, pull.order.targets.size
        if failed.size:
            _log.warning(
                "rank %d has not got %d of %d blocks: %s", self._rank, failed.size, num_blocks, problem
            )
        self._report(
            KvReportKind.PULLED,
            pull.order.pull_id,
            name=problem if failed.size else "",
            failed=failed,
            num_bytes=reader.num_bytes,
            seconds=reader.seconds,
        )
        self._has_news.set()

    def _release(self, endpoint: str, generation: int) -> None:
        with (
            closing(self._transport.connect(endpoint)) as peer,
            suppress(KvReadError),
        ):  # the lease ends by itself
            peer.release(generation)

    def _report(self, kind: KvReportKind, number: int = 0, **values: object) -> None:
        self._reports.put(KvReport(self._rank, kind, number, **values))  # type: ignore[arg-type]


def open_service(
    blocks: KvBlocks,
    weights: str,
    endpoint: str,
    keys: CurveKeys | None,
    run: Callable[[Callable[[], None]], None],
    *,
    has_nixl: bool = False,
) -> KvService | NoKvService:
    """Return a service, or none if its endpoint cannot be bound: the rank computes without."""
    try:
        return KvService(blocks, weights, endpoint, keys, run, has_nixl=has_nixl)
    except zmq.ZMQError as error:
        _log.warning(
            "rank %d: blocks do not travel, %s cannot be bound: %s", blocks.layout.rank, endpoint, error
        )
        return NoKvService()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Heads of some blocks of a group, which one peer has.

    Attributes:
        places: of the blocks in the pull.
        width: bytes of these heads of a block.
    """

    group: int
    places: IntArray
    heads: Heads
    width: int

    @property
    def num_bytes(self) -> int:
        return self.places.size * self.width

    def split(self, num_bytes: int) -> Iterator[_Chunk]:
        """Yield chunks of at most `num_bytes`, or of one block."""
        step = max(1, num_bytes // self.width)
        for start in range(0, self.places.size, step):
            yield replace(self, places=self.places[start : start + step])


class _Reader:
    """One pull of one rank: from each peer that has some of its heads, chunk by chunk.

    Attributes:
        num_bytes, seconds: read so far, and the time that it took.
    """

    def __init__(self, blocks: KvBlocks, open_peer: Callable[[str], KvPeer], pull: _OpenPull) -> None:
        self._blocks, self._open_peer, self._pull = blocks, open_peer, pull
        self._deadline = time.monotonic() + pull.order.timeout_s
        self.num_bytes, self.seconds = 0, 0.0
        self._chunks = self._split()
        self._num_missing = np.zeros(pull.order.targets.size, np.int64)
        for chunk in chain(*self._chunks.values()):
            self._num_missing[chunk.places] += 1

    @property
    def failed(self) -> IntArray:
        """Places of the blocks of which not all heads are there."""
        return np.flatnonzero(self._num_missing).astype(np.int32)

    def read_all(self) -> str:
        """Read all blocks; return why some are missing, empty if none is."""
        started = time.monotonic()
        try:
            for endpoint, chunks in self._chunks.items():
                self._read_from(endpoint, chunks)
        except KvReadError as error:
            return str(error)
        finally:
            self.seconds = time.monotonic() - started
        return ""

    def _split(self) -> dict[str, list[_Chunk]]:
        """Return endpoint |-> what to read there: each of this rank's heads once."""
        own, endpoints, found = self._blocks.layout, self._pull.order.endpoints, dict[str, list[_Chunk]]()
        groups = own.transferred_groups
        taken = [[set[int]() for _ in group.layers] for group in groups]
        # Of equally many ranks the one with this rank's number has the same heads.
        ranks = sorted(range(len(endpoints)), key=lambda rank: rank != own.rank)
        for rank in ranks:
            peer = replace(own, rank=rank, tensor_parallel_size=len(endpoints))
            chunks = [
                chunk
                for group in range(len(groups))
                if (chunk := self._chunk_of(group, heads_to_read(own, peer, group, taken[group]))) is not None
            ]
            if chunks:
                found[endpoints[rank]] = chunks
        return found

    def _chunk_of(self, group: int, heads: Heads) -> _Chunk | None:
        lens, own = self._pull.order.group_lens.tolist(), self._blocks.place_in_pull(group)
        start, width = sum(lens[:own]), self._blocks.block_bytes(group, heads)
        places = np.arange(start, start + sum(lens[own : own + 1]), dtype=np.int32)
        return _Chunk(group, places, heads, width) if width and places.size else None

    def _read_from(self, endpoint: str, chunks: list[_Chunk]) -> None:
        peer = self._open_peer(endpoint)
        try:
            peer.hello(self._blocks.layout, min(SILENCE_S, self._time_left_s(endpoint)))
            parts = chain.from_iterable(chunk.split(peer.read_bytes) for chunk in chunks)
            order, waiting, reading = self._pull.order, deque(parts), dict[int, _Chunk]()
            while waiting or reading:
                while waiting and len(reading) < READS_AT_ONCE:
                    chunk = waiting.popleft()
                    sources, targets = order.sources[chunk.places], order.targets[chunk.places]
                    number = peer.read(
                        order.generation, chunk.group, sources, targets, chunk.heads, chunk.num_bytes
                    )
                    reading[number] = chunk
                self._count(reading.pop(self._await_read(peer, endpoint)))
        finally:
            peer.close()

    def _await_read(self, peer: KvPeer, endpoint: str) -> int:
        """Return the next read that is done. Raises KvReadError if none is in time, or nobody waits any more."""
        silent_at = time.monotonic() + SILENCE_S
        while time.monotonic() < silent_at:
            done = peer.poll(min(_LOOK_S, self._time_left_s(endpoint)))
            if self._pull.canceled.is_set():
                raise KvReadError(KvFailure.CANCELED, "nobody waits for the blocks any more")
            if done is not None:
                return done
        raise KvReadError(KvFailure.TIMEOUT, f"{endpoint} has not answered for {SILENCE_S:g} s")

    def _count(self, chunk: _Chunk) -> None:
        self._num_missing[chunk.places] -= 1
        self.num_bytes += chunk.num_bytes

    def _time_left_s(self, endpoint: str) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            timeout_s = self._pull.order.timeout_s
            raise KvReadError(KvFailure.TIMEOUT, f"{endpoint} has not sent all blocks in {timeout_s:g} s")
        return left_s
