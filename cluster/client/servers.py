"""Servers: the gateways that a client may call, one of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of targets that gRPC itself resolves to several addresses.
_SCHEMES = ("ipv4:", "ipv6:", "dns:", "unix:", "unix-abstract:", "vsock:", "xds:")


def split_target(target: str) -> list[str]:
    """Return the targets of a list that is separated by commas; a gRPC target with a scheme is one."""
    if target.startswith(_SCHEMES):
        return [target]
    return [each.strip() for each in target.split(",") if each.strip()] or [target]


class Servers:
    """Selection of one of several servers, which stays until the server cannot be reached. Threads may share it.

    Attributes:
        targets: one per server.
        selected: index of the server for the next call.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self.targets = tuple(targets)
        self.selected = 0

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def target(self) -> str:
        return self.targets[self.selected]

    def leave(self, index: int) -> None:
        """Select the server after `index`, unless another call has left that server already."""
        if self.selected == index:
            self.selected = (index + 1) % len(self.targets)


class SelectedStub:
    """A gRPC stub whose methods call the selected server.

    Args:
        stubs: one per server.
    """

    def __init__(self, servers: Servers, stubs: Sequence[Any]) -> None:
        self._servers = servers
        self._stubs = stubs

    def __getattr__(self, name: str) -> Any:
        def call(request: Any, **options: Any) -> Any:
            return getattr(self._stubs[self._servers.selected], name)(request, **options)

        return call
