"""File descriptors of this process: their limit, and how many connections of clients they allow."""

from __future__ import annotations

import resource

# Keeps file descriptors free for the process's own sockets, files and workers.
_RESERVED = 256
# As a shell's or systemd's soft limit is often 1,024; the hard limit is mostly far above this.
_WANTED = 1 << 16


def raise_descriptor_limit() -> None:
    """Raise the soft limit towards the hard one, which only an administrator can raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(at_most: int) -> int:
    """Return how many connections each of the two servers of a gateway may hold.

    A server that takes every descriptor keeps the other one, and the gateway's own files, from working.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return at_most if soft == resource.RLIM_INFINITY else max(1, min(at_most, (soft - _RESERVED) // 2))
