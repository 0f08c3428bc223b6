"""NixlEnd: a rank's blocks in registered memory, for one-sided reads by NIXL: over RDMA, or whatever UCX has.

A rank has two agents. Others read what the first one has registered, without its processor. The second one reads for
this rank. Neither NIXL nor UCX can take back a read that has begun, and the system or a network card may write to the
blocks as long as it lasts. So an agent that reads is given up, with its connections and registrations, unless all of
its reads are known to have ended: nothing of it can write after that.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.native.memory import Addresses
from ...proto.errors import ConfigError, in_one_line
from .kv_blocks import KvBlocks

# Agents that a reader remembers; a lender that has ended leaves one behind.
MAX_REMOTES = 64
# How long an end of the reads that nobody waits for is awaited, before their agent is given up.
_END_TIMEOUT_S = 0.25
# A read that has not ended after so long does not pass the network: the next ones go another way.
_LONG_S = 1.0
_BACKEND = "UCX"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """Registered memory with the blocks of a rank.

    Attributes:
        agent, metadata: the agent that has registered it, and what other agents need to reach it.
        planes: of all groups, by addresses, see Planes.pack.
        device: number of the GPU that has the memory; -1 for the host's.
    """

    agent: str
    metadata: bytes
    planes: bytes
    device: int


class NixlError(Exception):
    """A read that NIXL refused, or that failed."""


def check_nixl_is_installed() -> None:
    """Raise ConfigError if ``kv_transport`` cannot be ``nixl`` here."""
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(
            "kv_transport is 'nixl', but NIXL is not installed (no module nixl); pip install 'quire[nixl]', or "
            "choose auto"
        )


def open_nixl(blocks: KvBlocks) -> NixlEnd | None:
    """Return a rank's end of reads by NIXL; None, and a warning, if its memory cannot be registered."""
    rank = blocks.layout.rank
    try:
        opened = NixlEnd(blocks)
    except (NixlError, ImportError) as error:
        _log.warning("rank %d: blocks travel without NIXL: %s", rank, in_one_line(error))
        return None
    _log.info("rank %d: blocks travel by NIXL", rank)
    return opened


class NixlRead:
    """A read that has begun.

    Attributes:
        is_over: nothing is written any more.
    """

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._started_at = time.monotonic()
        self.is_over = False

    @property
    def is_long(self) -> bool:
        return not self.is_over and time.monotonic() - self._started_at > _LONG_S

    def poll(self) -> bool:
        """Return whether all bytes are there. Raises NixlError if they will never be."""
        if not self.is_over:
            state = _call(self._agent.check_xfer_state, self._handle)
            if state == "ERR":
                raise NixlError("the read has failed")
            self.is_over = state == "DONE"
        return self.is_over

    def free(self) -> None:
        """Free what NIXL keeps of the read."""
        with suppress(NixlError):
            _call(self._agent.release_xfer_handle, self._handle)
        self._agent = self._handle = None


class NixlEnd:
    """One rank's end of all reads by NIXL.

    Raises:
        NixlError: the memory cannot be registered.
    """

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._served = _Agent(blocks, serves=True)
        self._reading: _Agent | None = _Agent(blocks, serves=False)
        self._failed = set[str]()  # agents that others have, from which reads failed
        self._warned = set[str]()
        self.memory = NixlMemory(
            self._served.name,
            _call(self._served.nixl.get_agent_metadata),
            blocks.planes.pack(0),
            _device(blocks),
        )

    def readable(self, memory: NixlMemory | None, endpoint: str) -> NixlMemory | None:
        """Return the memory of a peer; None, and a warning, if its blocks come another way."""
        if memory is not None and memory.agent not in self._failed:
            return memory
        if endpoint not in self._warned:
            reason = "does not serve by NIXL" if memory is None else "could not be read by NIXL"
            _log.warning("%s %s: its blocks come another way", endpoint, reason)
            self._warned.add(endpoint)
        return None

    def begin(self, memory: NixlMemory, into: Addresses, theirs: Addresses, lengths: Addresses) -> NixlRead:
        """Begin to read pieces of another rank's memory. Raises NixlError."""
        if self._reading is None:
            self._reading = _Agent(self._blocks, serves=False)
        pieces = _join(into.ravel(), theirs.ravel(), lengths.ravel())
        return self._reading.begin(memory, *pieces)

    def end(self, memory: NixlMemory, reads: list[NixlRead]) -> None:
        """Return when none of the reads from a rank writes to blocks of this one any more."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        with suppress(NixlError):
            while not all(read.poll() for read in reads) and time.monotonic() < deadline:
                time.sleep(0.001)  # NIXL has no call that waits
        if any(read.is_long for read in reads):
            self._failed.add(memory.agent)
        is_over = all(read.is_over for read in reads)
        for read in reads:
            read.free()
        if not is_over and self._reading is not None:
            self._reading.close()
            self._reading = None

    def forget(self, memory: NixlMemory) -> None:
        """Read no more from a rank's agent."""
        self._failed.add(memory.agent)

    def close(self) -> None:
        """Serve and read no more. Safe to call twice."""
        for agent in (self._served, self._reading):
            if agent is not None:
                agent.close()


class _Agent:
    """An agent of NIXL with a rank's memory.

    Args:
        serves: it answers what UCX does without the help of hardware, in a thread of its own.
    """

    def __init__(self, blocks: KvBlocks, *, serves: bool) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # of an extra

        self.name = f"quire-{secrets.token_hex(8)}"
        self._kind, self._device = ("VRAM" if blocks.are_on_gpu else "DRAM"), max(0, _device(blocks))
        self._remotes = dict[str, Any]()  # their names |-> as NIXL has them; the latest last
        config = nixl_agent_config(enable_prog_thread=serves, backends=[_BACKEND])
        self.nixl = _call(nixl_agent, self.name, config)
        regions = [
            (each.data_ptr(), each.numel() * each.element_size(), self._device, "") for each in blocks.tensors
        ]
        self._registered = _call(self.nixl.register_memory, regions, self._kind)

    def begin(self, memory: NixlMemory, into: Addresses, theirs: Addresses, lengths: Addresses) -> NixlRead:
        name = self._remotes.pop(memory.agent, None)
        if name is None:
            if len(self._remotes) >= MAX_REMOTES:
                _call(self.nixl.remove_remote_agent, self._remotes.pop(next(iter(self._remotes))))
            name = _call(self.nixl.add_remote_agent, memory.metadata)
        self._remotes[memory.agent] = name
        own = self.nixl.get_xfer_descs(_descriptors(into, lengths, self._device), self._kind)
        kind, device = ("VRAM", memory.device) if memory.device >= 0 else ("DRAM", 0)
        others = self.nixl.get_xfer_descs(_descriptors(theirs, lengths, device), kind)
        read = NixlRead(self.nixl, _call(self.nixl.initialize_xfer, "READ", own, others, name))
        try:
            read.is_over = _call(self.nixl.transfer, read._handle) == "DONE"
        except NixlError:
            read.free()
            raise
        return read

    def close(self) -> None:
        """Give up the agent, with its connections. Safe to call twice."""
        if self.nixl is not None:
            with suppress(NixlError):
                _call(self.nixl.deregister_memory, self._registered)
        self.nixl = self._registered = None  # which ends it
        self._remotes.clear()


def _call(function: Any, *args: Any) -> Any:
    """Call a function of NIXL, whose errors have no class in common.

    The error keeps neither the agent nor a handle alive, so that an agent that is given up ends.
    """
    try:
        return function(*args)
    except Exception as error:
        problem = in_one_line(error)
    del function, args
    raise NixlError(problem)


def _device(blocks: KvBlocks) -> int:
    device = blocks.tensors[0].device
    return -1 if device.type == "cpu" else device.index or 0


def _descriptors(addresses: Addresses, lengths: Addresses, device: int) -> Addresses:
    return np.stack((addresses, lengths, np.full_like(lengths, device)), axis=1)


def _join(into: Addresses, theirs: Addresses, lengths: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Join pieces that follow each other in both memories, in the order of the first one."""
    order = np.argsort(into, kind="stable")
    order = order[lengths[order] > 0]
    into, theirs, lengths = into[order], theirs[order], lengths[order]
    follows = (into[1:] == into[:-1] + lengths[:-1]) & (theirs[1:] == theirs[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return into[starts], theirs[starts], np.add.reduceat(lengths, starts)
