"""Status types of Client and AsyncClient: the models, replicas and nodes of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...proto.stream import RankStatus


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the server serves."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class KvCacheInfo:
    """KV cache of a replica.

    Attributes:
        num_cached_blocks: blocks in the prefix cache that no sequence holds.
        num_used_tokens: tokens in the used blocks.
        mean_kv_fragmentation: share of allocated KV slots that hold no token, mean over all steps.
        prefix_query_tokens: prompt tokens that were looked up in the prefix cache.
        prefix_hit_tokens: prompt tokens that were found there.
        num_host_blocks: blocks of host memory, in addition to num_blocks; 0 if there is no host tier.
        num_used_host_blocks: host blocks of preempted sequences.
        num_cached_host_blocks: host blocks evicted from the device, kept for the prefix cache.
        num_swapped_blocks: blocks copied between device and host memory so far, in both directions.
    """

    block_size: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    peak_used_blocks: int = 0
    num_used_tokens: int = 0
    mean_kv_fragmentation: float = 0.0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_swapped_blocks: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found; 0 if none was looked up."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Sequences of a replica. `num_finished` and `num_preemptions` are totals since its start."""

    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica as one gateway sees it. The counters are zero if the replica does not respond.

    Attributes:
        ready: the gateway sends it requests.
        problem: why it is not ready; empty if it is.
        state: ``starting``, ``ready``, ``draining``, ``stopped`` or ``failed``; None outside of a fleet.
        version: of its deployment; empty outside of a fleet.
        node_ids: nodes of its processes; empty outside of a fleet.
        mean_plan_wait_s: mean time that its ranks wait for the next plan after a step; idle time is excluded.
    """

    replica_id: str
    model: str
    ready: bool = False
    problem: str = ""
    state: str | None = None
    version: str = ""
    ranks: tuple[RankStatus, ...] = ()
    node_ids: tuple[str, ...] = ()
    kv: KvCacheInfo = field(default_factory=KvCacheInfo)
    queue: QueueInfo = field(default_factory=QueueInfo)
    num_steps: int = 0
    uptime_s: float = 0.0
    mean_plan_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """A deployment of a fleet.

    Attributes:
        target_replicas: number of replicas that the autoscaler wants now.
        reason: why the autoscaler wants that number.
        problem: why the last attempt to start a replica failed; empty if it did not.
    """

    model: str
    version: str
    min_replicas: int
    max_replicas: int
    target_replicas: int
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of the fleet's cluster.

    Attributes:
        resources: Ray resource |-> amount; memory in bytes.
    """

    node_id: str
    address: str
    draining: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """Replicas of a server, and the deployments and nodes if it serves a fleet.

    Attributes:
        problem: set if the fleet's part may be stale, since its controller does not respond.
    """

    replicas: tuple[ReplicaInfo, ...] = ()
    deployments: tuple[DeploymentInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    problem: str = ""
