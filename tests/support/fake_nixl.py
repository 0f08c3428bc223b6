"""FakeNixl: NIXL's agents of one process, with the signatures of its Python API; their reads copy memory."""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pytest

Descriptors = tuple[str, npt.NDArray[np.uint64]]


class nixlNotFoundError(Exception):
    """Memory that is not registered, or an agent that is not known."""


class nixlRemoteDisconnectError(Exception):
    """The other agent has ended."""


class FakeNixl:
    """Agents that reach each other.

    Attributes:
        agents: name |-> agent, as long as the process has it.
        polls_needed: looks at a read until it is done.
        on_read: called with a read before it copies; it may raise, or return the state ``ERR``.
        num_reads, num_pieces: begun so far.
    """

    def __init__(self) -> None:
        self.agents: WeakValueDictionary[str, FakeAgent] = WeakValueDictionary()
        self.polls_needed = 1
        self.on_read: Callable[[FakeRead], str | None] = lambda read: None
        self.num_reads = self.num_pieces = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``nixl`` be imported."""
        package, api = ModuleType("nixl"), ModuleType("nixl._api")
        package.__spec__ = importlib.machinery.ModuleSpec("nixl", None, is_package=True)
        network = self

        class nixl_agent(FakeAgent):
            def __init__(
                self, agent_name: str, nixl_conf: FakeConfig | None = None, instantiate_all: bool = False
            ) -> None:
                super().__init__(network, agent_name, nixl_conf)

        api.nixl_agent, api.nixl_agent_config = nixl_agent, FakeConfig  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl", package)
        monkeypatch.setitem(sys.modules, "nixl._api", api)


class FakeConfig:
    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = 5555,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] = ["UCX"],  # noqa: B006
        sync_mode: Any = None,
    ) -> None:
        self.enable_pthread, self.backends = enable_prog_thread, backends


class FakeRead:
    """A read of an agent; `other` is the agent that has the memory."""

    def __init__(self, own: Descriptors, others: Descriptors, other: str) -> None:
        self.own, self.others, self.other = own[1], others[1], other
        self.num_polls = 0
        self.is_released = self.is_done = False

    def copy(self) -> None:
        for (into, length, _), (start, _, _) in zip(self.own.tolist(), self.others.tolist(), strict=True):
            ctypes.memmove(into, start, length)


class FakeAgent:
    def __init__(self, network: FakeNixl, name: str, config: FakeConfig | None) -> None:
        assert config is not None
        assert config.backends == ["UCX"]
        self.network, self.name, self.config = network, name, config
        self.registered: list[list[tuple[int, int, int, str]]] = []
        self.remotes: set[str] = set()
        network.agents[name] = self

    def register_memory(
        self, reg_list: list[tuple[int, int, int, str]], mem_type: str | None = None, backends: list[str] = []  # noqa: B006
    ) -> list[tuple[int, int, int, str]]:  # fmt: skip
        assert mem_type in ("DRAM", "VRAM")
        self.kind = mem_type
        self.registered.append(reg_list)
        return reg_list

    def deregister_memory(
        self,
        dereg_list: list[tuple[int, int, int, str]],
        backends: list[str] = [],  # noqa: B006
    ) -> None:
        self.registered.remove(dereg_list)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.remotes.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: bytes) -> None:
        self.remotes.remove(agent.decode())

    def get_xfer_descs(self, descs: npt.NDArray[np.uint64], mem_type: str | None = None) -> Descriptors:
        assert mem_type in ("DRAM", "VRAM")
        assert descs.shape[1:] == (3,)
        assert descs.dtype == np.dtype(np.uint64)
        return mem_type, descs

    def initialize_xfer(
        self, operation: str, local_descs: Descriptors, remote_descs: Descriptors, remote_agent: bytes,
        notif_msg: bytes = b"", backends: list[str] = [],  # noqa: B006
    ) -> FakeRead:  # fmt: skip
        name = remote_agent.decode()
        assert operation == "READ"
        assert np.array_equal(local_descs[1][:, 1], remote_descs[1][:, 1])
        if name not in self.remotes:
            raise nixlNotFoundError(f"no agent {name}")
        self._check(local_descs[1])
        if (other := self.network.agents.get(name)) is not None:
            other._check(remote_descs[1])
        return FakeRead(local_descs, remote_descs, name)

    def _check(self, pieces: npt.NDArray[np.uint64]) -> None:
        regions = [region for each in self.registered for region in each]
        for start, length, _ in pieces.tolist():
            if not any(at <= start and start + length <= at + size for at, size, *_ in regions):
                raise nixlNotFoundError(f"{length} bytes at {start} are not registered")

    def transfer(self, handle: FakeRead, notif_msg: bytes = b"") -> str:
        self.network.num_reads += 1
        self.network.num_pieces += len(handle.own)
        return "PROC" if self.network.polls_needed else self._finish(handle)

    def check_xfer_state(self, handle: FakeRead) -> str:
        assert not handle.is_released
        handle.num_polls += 1
        return "PROC" if handle.num_polls < self.network.polls_needed else self._finish(handle)

    def _finish(self, handle: FakeRead) -> str:
        if handle.other not in self.network.agents:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        if handle.is_done:
            return "DONE"
        state = self.network.on_read(handle)
        if state is None:
            handle.copy()
            handle.is_done = True
        return state or "DONE"

    def release_xfer_handle(self, handle: FakeRead) -> None:
        handle.is_released = True
