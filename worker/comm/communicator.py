"""How ranks meet: the Communicator of a tensor-parallel group, and the part of a dimension that a rank holds."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from ...proto.errors import first_line

# The stubs of torch's process groups and stores lack what is used here.
dist: Any = torch.distributed

# Linux: asks for an interface's address by a struct ifreq.
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 256


class Communicator(Protocol):
    """The collectives of one tensor-parallel group. Every rank calls the same ones in the same order.

    Attributes:
        rank: this rank's place, from 0.
        size: ranks of the group.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each; `tensor` itself may hold it or become scratch."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, [size, ...] by rank. All have the same shape."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        ...

    def close(self) -> None:
        """Leaves the group. Safe to call twice."""
        ...


class SingleRank:
    """A group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchDistributed:
    """A group over gloo or NCCL that meets at a TCPStore.

    It uses a process group object of its own and leaves torch's global one alone.

    Args:
        rank, size: this rank's place and the ranks of the group.
        host, port: where rank 0's store listens; see open_store.
        backend: ``gloo`` or ``nccl``.
        timeout_s: how long to wait for the other ranks, to begin with and in each collective.

    Attributes:
        store: where the group met.

    Raises:
        ConnectionError: from the constructor and every collective; says among whom and with whom it failed.
    """

    def __init__(self, rank: int, size: int, host: str, port: int, backend: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._device = device_of("cuda" if backend == "nccl" else "cpu")
        timeout = timedelta(seconds=timeout_s)
        self._group: Any | None = None
        try:
            self.store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
            self._group = _BACKENDS[backend](self.store, rank, size, host, port, timeout)
            self.barrier()
        except (RuntimeError, ConnectionError) as error:
            self.close()
            raise ConnectionError(self._describe(f"joining at {host}:{port}", error)) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._wait("all-reduce", self._open_group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._wait("all-gather", self._open_group.allgather([list(gathered.unbind())], [tensor.contiguous()]))
        return gathered

    def barrier(self) -> None:
        # Reading the sum makes the host wait on a GPU, too.
        self.all_reduce(torch.ones(1, device=self._device)).item()

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    @property
    def _open_group(self) -> Any:
        if self._group is None:
            raise ConnectionError(f"rank {self.rank} has left the group")
        return self._group

    def _wait(self, what: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(self._describe(what, error)) from error

    def _describe(self, what: str, error: Exception) -> str:
        return f"{what} of rank {self.rank} with the others of {self.size} failed: {first_line(error)}"


def open_store(host: str) -> tuple[Any, int]:
    """Opens the meeting place of a group on a free port of `host`, an address of this machine.

    Returns:
        The TCPStore, which listens as long as it is kept, and its port.
    """
    # Left alone, the store listens on every address of the machine.
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a dimension that one of `size` ranks holds.

    Where `size` does not divide the dimension the last parts are shorter, but are computed as `padded_len` long.
    """

    rank: int
    size: int
    full_len: int

    @property
    def padded_len(self) -> int:
        return -(-self.full_len // self.size)

    @property
    def start(self) -> int:
        return min(self.rank * self.padded_len, self.full_len)

    @property
    def end(self) -> int:
        return min(self.start + self.padded_len, self.full_len)

    def __len__(self) -> int:
        return self.end - self.start


def _make_gloo(store: Any, rank: int, size: int, host: str, port: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Left alone, gloo listens on whatever address the host's name has.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host, port))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, host: str, port: int, timeout: timedelta) -> Any:
    # Left alone, NCCL takes the first network it finds, which may be one that the other hosts are not on.
    interface = interface_of(_own_address(host, port))
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_BACKENDS: dict[str, Callable[..., Any]] = {"gloo": _make_gloo, "nccl": _make_nccl}


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`: loopback for loopback."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, by name; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(_IFREQ_BYTES, b"\0")
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def device_of(kind: str) -> torch.device:
    """``cpu``, or this process's current CUDA device."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())
