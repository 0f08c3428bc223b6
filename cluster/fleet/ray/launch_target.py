"""LaunchTarget: the cluster that a replica is launched on, with its addresses, lifetime and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ....proto.transport.channel import ChannelAddress
from ....proto.transport.network import CurveKeys, tcp_endpoint

DEFAULT_NAMESPACE = "quire"


class LaunchTarget(Protocol):
    """Cluster that replicas are launched on: a LocalCluster of this process, or a FleetLaunchTarget.

    Attributes:
        namespace: Ray namespace of the actors' names.
        is_detached: replicas keep running after the process that launched them ends.
        resources_per_rank: Ray resources of each rank beside its CPU and, if it computes on one, its GPU.
        keys: CURVE keys of the replica's tcp sockets; None if its sockets are ipc.
        placement_timeout_s: seconds to wait for resources.
        node_selectors: labels that the nodes must have, most preferred first; the last is waited for longest.
        autoscaling_config: see `placement.ClusterView.read`.
    """

    @property
    def namespace(self) -> str: ...
    @property
    def is_detached(self) -> bool: ...
    @property
    def resources_per_rank(self) -> Mapping[str, float]: ...
    @property
    def keys(self) -> CurveKeys | None: ...
    @property
    def placement_timeout_s(self) -> float: ...
    @property
    def node_selectors(self) -> Sequence[Mapping[str, str]]: ...
    @property
    def autoscaling_config(self) -> str | None: ...

    def channel_address(self, host: str) -> ChannelAddress:
        """Return the address at which a scheduler on that host binds its step channel."""
        ...

    def mailbox_endpoint(self, replica_id: str, host: str) -> str:
        """Return the endpoint at which a scheduler on that host receives gateways' messages."""
        ...

    def on_processes_started(self) -> None:
        """Make a replica's new processes end with this process, unless the target is detached."""
        ...


@dataclass(frozen=True, slots=True)
class FleetLaunchTarget:
    """A running Ray cluster of any number of nodes. Replicas are detached: they outlive the launching process.

    Messages between nodes travel over tcp, encrypted and authenticated by the keys. The ranks' collectives are
    torch's and have no such protection: the nodes need a network of their own.
    """

    keys: CurveKeys
    namespace: str = DEFAULT_NAMESPACE
    resources_per_rank: Mapping[str, float] = field(default_factory=dict)
    placement_timeout_s: float = 900.0
    autoscaling_config: str | None = None
    node_selectors: Sequence[Mapping[str, str]] = ({},)

    @property
    def is_detached(self) -> bool:
        return True

    def channel_address(self, host: str) -> ChannelAddress:
        return ChannelAddress.on_host(host, self.keys)

    def mailbox_endpoint(self, replica_id: str, host: str) -> str:
        return tcp_endpoint(host)

    def on_processes_started(self) -> None:
        pass
