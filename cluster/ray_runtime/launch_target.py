"""LaunchTarget: where a replica's processes live, how long, and how they and the gateways reach each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...proto.transport.channel import ChannelAddress
from ...proto.transport.network import CurveKeys, tcp_endpoint

DEFAULT_NAMESPACE = "quire"


class LaunchTarget(Protocol):
    """Where replicas are launched: a LocalCluster of this process's own, or a FleetLaunchTarget.

    Attributes:
        namespace: Ray's, of the actors' names.
        outlives_us: the replica goes on when the process that launched it ends.
        resources_per_rank: Ray resources that each rank takes beside its CPU, and GPU where it computes on one.
        keys: that it takes to speak to the replica; None: its sockets are ipc.
        placement_timeout_s: how long to wait for room.
        autoscaling_config: see `placement.ClusterView.read`.
    """

    @property
    def namespace(self) -> str: ...
    @property
    def outlives_us(self) -> bool: ...
    @property
    def resources_per_rank(self) -> Mapping[str, float]: ...
    @property
    def keys(self) -> CurveKeys | None: ...
    @property
    def placement_timeout_s(self) -> float: ...
    @property
    def autoscaling_config(self) -> str | None: ...

    def channel(self, host: str) -> ChannelAddress:
        """Where a scheduler on that host binds the step channel."""
        ...

    def mailbox(self, replica_id: str, host: str) -> str:
        """The endpoint at which a scheduler on that host hears gateways."""
        ...

    def guard(self) -> None:
        """The replica's processes have been started: sees to their end where they must not outlive this one."""
        ...


@dataclass(frozen=True, slots=True)
class FleetLaunchTarget:
    """A running Ray cluster of any number of nodes. What is launched there is detached: it outlives its launcher.

    Messages travel over tcp between the nodes' addresses, encrypted, and only holders of the keys can speak. The
    ranks' collectives are torch's, which has no such protection: the nodes' network must be the cluster's own.
    """

    keys: CurveKeys
    namespace: str = DEFAULT_NAMESPACE
    resources_per_rank: Mapping[str, float] = field(default_factory=dict)
    placement_timeout_s: float = 900.0
    autoscaling_config: str | None = None

    @property
    def outlives_us(self) -> bool:
        return True

    def channel(self, host: str) -> ChannelAddress:
        return ChannelAddress.on_host(host, self.keys)

    def mailbox(self, replica_id: str, host: str) -> str:
        return tcp_endpoint(host)

    def guard(self) -> None:
        pass
