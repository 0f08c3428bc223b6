"""RingTransfers: sends and receives between ranks of one host, through rings of bytes in shared memory."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.native.library import is_available
from ...kernels.shm_collectives import RingEnd, ring_bytes
from .shared_memory import LIVENESS_CHECK_US, create_file, host_id, is_locked, map_locked, open_file
from .torch_distributed import TorchDistributed

# Bytes that a ring holds: the hidden states of several steps, so that their sender goes on. Pages that are never
# written take no memory.
RING_BYTES = 64 << 20
# The first page of the memory holds a random number, since a process of another host may have the same id.
_TOKEN = struct.Struct("q")


class Transfer(Protocol):
    """A send or a receive that has begun."""

    def wait(self) -> Tensor:
        """Return the tensor when it is sent or filled. Raises ConnectionError; names the other rank."""
        ...


class Transfers(Protocol):
    """Sends and receives of one rank.

    Tensors that one rank sends to another one arrive in order, and are waited for in this order.
    """

    def send(self, tensor: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to send a contiguous tensor, which nobody writes to until `wait` returns."""
        ...

    def receive(self, out: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to receive a tensor that the rank sends with the same tag."""
        ...

    def close(self) -> None:
        """Let other ranks wait for this one no more. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class _Peer:
    """One end of a ring.

    Attributes:
        file: with the lock of the rank at the other end, while that is alive.
    """

    rank: int
    end: RingEnd
    file: int


class _Sent:
    """A tensor that is in the ring."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class _Received:
    """A tensor that is read when it is waited for."""

    def __init__(self, transfers: RingTransfers, out: Tensor, peer: _Peer) -> None:
        self._transfers, self._out, self._peer = transfers, out, peer

    def wait(self) -> Tensor:
        self._transfers.move(self._out, self._peer, "receive from")
        return self._out


class RingTransfers:
    """Transfers with those ranks that can map this rank's memory, and by the group with the others.

    The memory has no name, so the system frees it when the ranks have ended, even if they were killed.

    Args:
        group: all ranks of the replica, which make their rings together.
        peers: ranks that this one sends to and receives from.
        timeout_s: how long to wait for another rank.

    Raises:
        ConnectionError: from the constructor and every transfer; names the operation and the rank.
    """

    def __init__(self, group: TorchDistributed, peers: list[int], timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._to, self._from = dict[int, _Peer](), dict[int, _Peer]()  # rank |-> the ring
        self._opened = ExitStack()
        try:
            self._open(peers)
        except BaseException:
            self.close()
            raise

    def send(self, tensor: Tensor, rank: int, tag: int) -> Transfer:
        if (peer := self._to.get(rank)) is None:
            return self._group.send(tensor, rank, tag)
        self.move(tensor, peer, "send to")
        return _Sent(tensor)

    def receive(self, out: Tensor, rank: int, tag: int) -> Transfer:
        peer = self._from.get(rank)
        return self._group.receive(out, rank, tag) if peer is None else _Received(self, out, peer)

    def move(self, tensor: Tensor, peer: _Peer, operation: str) -> None:
        """Copy a tensor to a ring or from it; wait while it is full or empty."""
        if peer not in (self._to.get(peer.rank), self._from.get(peer.rank)):
            raise ConnectionError(f"rank {self._group.rank} has left the group")
        done, deadline = peer.end.move(tensor, 0, LIVENESS_CHECK_US), time.monotonic() + self._timeout_s
        while done < tensor.nbytes:
            # A rank that has ended may have written before.
            is_alive = is_locked(peer.file, peer.rank)
            moved = peer.end.move(tensor, done, LIVENESS_CHECK_US if is_alive else 0)
            if moved:
                done, deadline = done + moved, time.monotonic() + self._timeout_s
            elif not is_alive:
                raise self._failure(operation, peer, "it has ended")
            elif time.monotonic() > deadline:
                raise self._failure(operation, peer, f"it did not come within {self._timeout_s:g} s")

    def close(self) -> None:
        for peer in (*self._to.values(), *self._from.values()):
            peer.end.close()
        self._to.clear()
        self._from.clear()
        self._opened.close()  # with the locks, which show that this rank is alive

    def _failure(self, operation: str, peer: _Peer, reason: str) -> ConnectionError:
        return ConnectionError(f"{operation} rank {peer.rank} of rank {self._group.rank} failed: {reason}")

    def _open(self, peers: list[int]) -> None:
        """Make a ring for each peer, which may be on another host, and open the peers' rings for this rank."""
        group = self._group
        stride = -(-ring_bytes(RING_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE if is_available() else 0
        num_bytes = mmap.PAGESIZE + group.size * stride
        file = create_file("quire-transfers", num_bytes, self._opened)
        memory = None if file is None else map_locked(file, num_bytes, group.rank)
        token = secrets.randbits(62)
        if memory is not None:
            memory[: _TOKEN.size] = _TOKEN.pack(token)
        number = -1 if file is None or memory is None else file
        ranks = group.all_gather(torch.tensor([host_id(), os.getpid(), number, token])).tolist()
        reads = torch.zeros(group.size, dtype=torch.int32)
        for rank in peers:
            host, process, number, token = ranks[rank]
            theirs = open_file(process, number, self._opened) if host == ranks[group.rank][0] else None
            mapped = None if theirs is None else map_locked(theirs, num_bytes, group.rank)
            if theirs is None or mapped is None or _TOKEN.unpack_from(mapped)[0] != token:
                continue
            reads[rank] = 1
            end = RingEnd(mapped, mmap.PAGESIZE + group.rank * stride, RING_BYTES, writes=False)
            self._from[rank] = _Peer(rank, end, theirs)
        readers = group.all_gather(reads)[:, group.rank].tolist()
        for rank in peers:
            if readers[rank] and file is not None and memory is not None:
                end = RingEnd(memory, mmap.PAGESIZE + rank * stride, RING_BYTES, writes=True)
                self._to[rank] = _Peer(rank, end, file)
