"""WeightSource: where the weights of a running rank can be read. Without torch, since gateways pass it on."""

from __future__ import annotations

from dataclasses import dataclass

from ..memory.shared_segment import SegmentAddress


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Process that has the weights of a rank, and the ways to read them. Picklable.

    Attributes:
        owner: for messages.
        segments: for processes of the owner's host.
        host, port: for processes of other hosts; port 0 if there is none.
        credentials: a token and a key for each connection.
    """

    owner: str
    segments: tuple[SegmentAddress, ...]
    host: str = ""
    port: int = 0
    credentials: tuple[tuple[bytes, bytes], ...] = ()
