"""Origins of a rank's weights beside the model's files. Without torch, since gateways pass them on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ..memory.shared_segment import SegmentAddress


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Process that has the weights of a rank, or its node's copy of the files, and the ways to read them. Picklable.

    Attributes:
        owner: for messages.
        segments: for processes of the owner's host.
        host, port: for processes of other hosts; port 0 if there is none.
        credentials: a token and a key for each connection.
        node: of the owner, where its node's copy is meant.
    """

    owner: str
    segments: tuple[SegmentAddress, ...]
    host: str = ""
    port: int = 0
    credentials: tuple[tuple[bytes, bytes], ...] = ()
    node: str = ""


@dataclass(frozen=True, slots=True)
class NodePeers:
    """Nodes whose copies of the model's files a node fills its own from. Picklable.

    Attributes:
        fellows: the nodes of this replica that have a cache, in the same order on each of them: they fill their
            copies at the same time, and each reads a part of the files for all.
        own: index of this node among them; None if it is not there.
        earlier: nodes of replicas that have the weights or began to load them earlier, the one to ask first in front.
    """

    fellows: tuple[WeightSource, ...] = ()
    own: int | None = None
    earlier: tuple[WeightSource, ...] = ()

    def after_a_use(self) -> NodePeers:
        """Return the peers for the next model, without the credentials that were used."""
        fellows, earlier = (
            tuple(replace(each, credentials=each.credentials[1:]) for each in sources)
            for sources in (self.fellows, self.earlier)
        )
        has_more = any(each.credentials for each in (*fellows, *earlier))
        return NodePeers(fellows, self.own, earlier) if has_more else NO_PEERS


NO_PEERS = NodePeers()

WeightOrigin: TypeAlias = SegmentAddress | WeightSource | NodePeers
