"""TorchDistributed: the collectives of a tensor-parallel group over gloo or NCCL."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor

from ...proto.errors import first_line
from .communicator import Arrival, RowCounts, nothing
from .deadline import ends_within

# The stubs of torch's process groups and stores lack what is used here.
dist: Any = torch.distributed

# Linux ioctl that returns the IPv4 address of an interface in a struct ifreq.
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 256
# Leaving a group takes milliseconds.
CLOSE_TIMEOUT_S = 5.0
# How often a rank that waits for others at the store checks whether it has left the group.
MEETING_CHECK_S = 1.0

_log = logging.getLogger(__name__)


class Transfer:
    """A send, a receive or an all-to-all that has begun.

    Args:
        describe: makes the text of an error.
        source: what is sent, if that is another tensor; it stays in memory as long as the transfer.
    """

    def __init__(
        self, tensor: Tensor, work: Any, describe: Callable[[Exception], str], source: Tensor | None = None
    ) -> None:
        self._tensor, self._work, self._describe, self._source = tensor, work, describe, source

    def wait(self) -> Tensor:
        """Return the tensor when it is sent or filled. Raises ConnectionError; names the other rank."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ConnectionError(self._describe(error)) from error
        return self._tensor


class TorchDistributed:
    """Communicator over gloo or NCCL, with a TCPStore for the rendezvous.

    It has a process group of its own and does not touch torch's default group.

    Args:
        rank, size: index of this rank and number of ranks.
        device: of the tensors: gloo on a CPU, NCCL on a GPU. It must be the thread's current device.
        store: the store of the rendezvous.
        group: a process group of torch with the backend for the device.

    Raises:
        ConnectionError: from `join` and every collective; names the operation and the rank.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any, group: Any) -> None:
        self.rank, self.size = rank, size
        self.store = store
        self._device = device
        self._group: Any | None = group
        self._num_meetings = 0

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        host: str,
        port: int,
        device: torch.device,
        timeout_s: float,
        name: str = "",
    ) -> Self:
        """Join a group once all its ranks do.

        Args:
            host, port: address of rank 0's store; see create_store.
            timeout_s: how long to wait for the other ranks, both to join and in each collective.
            name: of the group, of several that meet at one store.
        """
        timeout = timedelta(seconds=timeout_s)
        joined: Self | None = None
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
            if name:
                store = dist.PrefixStore(name, store)
            group = _BACKENDS[device.type](store, rank, size, host, port, timeout)
            joined = cls(rank, size, device, store, group)
            joined.barrier()
        except (RuntimeError, ConnectionError) as error:
            if joined is not None:
                joined.close()
            raise ConnectionError(_describe(rank, size, f"joining at {host}:{port}", error)) from error
        return joined

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._run(
            "all-reduce", lambda group: group.allreduce([tensor], _on_current_stream(dist.AllreduceOptions()))
        )
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered, own = tensor.new_empty((self.size, *tensor.shape)), tensor.contiguous()
        options = _on_current_stream(dist.distributed_c10d.AllgatherOptions())
        self._run("all-gather", lambda group: group._allgather_base(gathered.view(-1), own.view(-1), options))
        return gathered

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        sent, received = list(counts[self.rank]), [own[self.rank] for own in counts]
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        # On a GPU NCCL takes its own stream: what is computed before the wait overlaps with the transfer.
        options, source = dist.AllToAllOptions(), rows.contiguous()
        return self._transfer(
            "all-to-all", out, lambda group: group.alltoall_base(out, source, received, sent, options), source
        )

    def send(self, tensor: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to send a contiguous tensor, which nobody writes to until `wait` returns."""
        return self._transfer(f"send to rank {rank}", tensor, lambda group: group.send([tensor], rank, tag))

    def receive(self, out: Tensor, rank: int, tag: int) -> Transfer:
        """Begin to receive a tensor that the rank sends with the same tag."""
        return self._transfer(f"receive from rank {rank}", out, lambda group: group.recv([out], rank, tag))

    def _transfer(
        self, operation: str, tensor: Tensor, start: Callable[[Any], Any], source: Tensor | None = None
    ) -> Transfer:
        def describe(error: Exception) -> str:
            return self._describe(operation, error)

        try:
            return Transfer(tensor, start(self._open_group), describe, source)
        except RuntimeError as error:
            raise ConnectionError(describe(error)) from error

    def barrier(self) -> None:
        # item() makes the host wait on a GPU as well.
        self.all_reduce(torch.ones(1, device=self._device)).item()

    def meet(self, timeout_s: float) -> None:
        # NCCL's watchdog ends a rank whose collective waits longer than the group's timeout, and has no other one per
        # collective; so ranks with GPUs wait at the store. Gloo notices that another rank has ended.
        if self._device.type == "cpu":
            options = dist.BarrierOptions()
            options.timeout = timedelta(seconds=timeout_s)
            self._run("meeting", lambda group: group.barrier(options))
            return
        self._num_meetings += 1
        key = f"quire/meeting/{self._num_meetings}"
        if self.store.add(f"{key}/ranks", 1) == self.size:
            self.store.set(key, "all")
        deadline = time.monotonic() + timeout_s
        while True:
            _ = self._open_group  # another thread leaves it when a rank has failed
            remaining_s = deadline - time.monotonic()
            try:
                self.store.wait([key], timedelta(seconds=max(0.001, min(MEETING_CHECK_S, remaining_s))))
                return
            except dist.DistStoreError as error:
                if remaining_s <= MEETING_CHECK_S:
                    raise ConnectionError(self._describe(f"meeting in {timeout_s:g} s", error)) from error
            except RuntimeError as error:
                raise ConnectionError(self._describe("meeting", error)) from error

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        """Leave the group within CLOSE_TIMEOUT_S, also while a collective waits for a rank that has ended.

        NCCL's abort first ends the kernels, for which the destruction of a graph waits, and then waits for the
        destruction of every graph that its collectives are recorded in.
        """
        if self._group is None:
            drop_recordings()
            return
        group, self._group = self._group, None
        # NCCL's shutdown waits for the kernels of its collectives, which wait for the other ranks; abort ends them.
        leave = group.abort if self._device.type == "cuda" else group.shutdown
        if not ends_within(CLOSE_TIMEOUT_S, leave, drop_recordings):
            _log.warning("rank %d: the group was not left in %g s", self.rank, CLOSE_TIMEOUT_S)

    @property
    def _open_group(self) -> Any:
        if self._group is None:
            raise ConnectionError(f"rank {self.rank} has left the group")
        return self._group

    def _run(self, operation: str, start: Callable[[Any], Any]) -> None:
        """Start a collective of the group and wait for it: on a GPU the stream waits, not the host.

        NCCL raises errors of the other ranks when a collective is started, too.
        """
        group = self._open_group
        try:
            work = start(group)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise  # of the recording: nothing is sent meanwhile
            raise ConnectionError(self._describe(operation, error)) from error

    def _describe(self, operation: str, error: Exception) -> str:
        return _describe(self.rank, self.size, operation, error)


def _describe(rank: int, size: int, operation: str, error: Exception) -> str:
    return f"{operation} of rank {rank} with the others of {size} failed: {first_line(error)}"


def _on_current_stream(options: Any) -> Any:
    """Let NCCL use the current stream: its own stream would wait for the current one and that for it, by events."""
    options.asyncOp = False
    return options


def create_store(host: str) -> tuple[Any, int]:
    """Create the store for the rendezvous of a group, on a free port of `host`, an address of this machine.

    Returns:
        the TCPStore, which listens as long as it is referenced, and its port.
    """
    # Without a listener of its own, the store listens on every address of the machine.
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address. Returns None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(_IFREQ_BYTES, b"\0")
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def _make_gloo(store: Any, rank: int, size: int, host: str, port: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # By default gloo listens on the address that the host name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, host: str, port: int, timeout: timedelta) -> Any:
    # By default NCCL uses the first network it finds, which the other hosts may not be on.
    interface = interface_of(_own_address(host, port))
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[..., Any]] = {"cpu": _make_gloo, "cuda": _make_nccl}


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`: loopback for loopback."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own
