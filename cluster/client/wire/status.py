"""Status types of Client and AsyncClient: the models, replicas and nodes of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....proto.block_map import MappedSequence
from ....proto.replica_status import KvCacheInfo, QueueInfo, ReplicaFigures


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the server serves.

    Attributes:
        reads_images: conversations may have images.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    reads_images: bool = False


@dataclass(frozen=True)
class ReplicaInfo(ReplicaFigures):
    """A replica as one gateway sees it, with its figures. The counters are zero if the replica does not respond.

    Attributes:
        ready: the gateway sends it requests.
        state: ``starting``, ``ready``, ``draining``, ``stopped`` or ``failed``; None outside of a fleet. A
            draining replica is `ready` until another one takes over.
        version: version of its deployment; empty outside of a fleet.
        node_ids: nodes of its processes; empty outside of a fleet.
        silence_s: time since its latest message to the gateway, while one is due.
        activity: ``idle``, ``busy``, ``prefill`` (a step that takes long, as expected), ``late`` (a step takes much
            longer than expected) or ``recovering`` (its ranks are being rebuilt).
        paused: an operator holds its steps.
        role: part of a request that it computes: ``both``, ``prefill`` or ``decode``; empty if it does not respond.
    """

    ready: bool = False
    state: str | None = None
    version: str = ""
    node_ids: tuple[str, ...] = ()
    kv: KvCacheInfo = field(default_factory=KvCacheInfo)
    queue: QueueInfo = field(default_factory=QueueInfo)
    silence_s: float = 0.0
    activity: str = ""
    paused: bool = False
    role: str = ""


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
class LatencyInfo:
    """Quantiles in seconds; None without observations."""

    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficInfo:
    """Requests of one model through one gateway over the last minute.

    Attributes:
        seconds: time that the rates and quantiles cover; 0 in the first second of a gateway.
        num_open: requests that have not ended.
        num_unplaced: requests that wait for a replica.
        first_token: time from a request's arrival to its first token.
        inter_token: time between two tokens.
        generated_tokens_per_s_history: the tokens of each second of the last minute, the oldest first.
    """

    model: str
    seconds: float = 0.0
    num_open: int = 0
    num_unplaced: int = 0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    completions_per_s: float = 0.0
    errors_per_s: float = 0.0
    first_token: LatencyInfo = LatencyInfo()
    inter_token: LatencyInfo = LatencyInfo()
    generated_tokens_per_s_history: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockMapInfo:
    """States of a replica's KV blocks. Cell i shows block 1 + i * stride.

    Attributes:
        stride: 1 unless the pool is so large that only a sample of its blocks is shown.
        states: one BlockState per cell.
        rows: row of a sequence that holds the cell's block; -1 if none does.
        sequences: the running sequences with the most blocks.
        slot_states: one BlockState per slot for the state of a sequence; cached ones are snapshots of prefixes.
        slot_rows: row of the sequence whose state is in the slot; -1 if it is none's.
    """

    num_blocks: int
    stride: int
    states: bytes
    rows: tuple[int, ...]
    sequences: tuple[MappedSequence, ...] = ()
    slot_states: bytes = b""
    slot_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """Replicas of a server, and the deployments and nodes if it serves a fleet.

    Attributes:
        problem: set if the fleet's part may be stale, since its controller does not respond.
        traffic: requests through this gateway, by model.
    """

    replicas: tuple[ReplicaInfo, ...] = ()
    deployments: tuple[DeploymentInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()
    problem: str = ""
    traffic: tuple[TrafficInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's version, models and limits.

    Attributes:
        resume_window_s: how long a resumable request runs on without a connection.
        retention_s: how long the output of a finished request with a request_id is kept.
        max_message_bytes: largest message that the server accepts.
        max_request_bytes: largest request that it accepts in pieces; 0 if it accepts none.
    """

    version: str
    uptime_s: float
    models: tuple[ModelInfo, ...]
    resume_window_s: float
    retention_s: float
    max_message_bytes: int
    max_request_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A LoRA adapter.

    Attributes:
        name: the model of its requests.
        path: its directory.
        model: the model that it changes.
    """

    name: str
    path: str
    model: str


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The load of a model's ready replicas, from all their servers; `num_unplaced` is that of this server.

    Attributes:
        num_unplaced: requests of this server that wait for a replica.
        num_queued_tokens: prompt tokens that are not computed yet.
        kv_use: share of the KV blocks that sequences hold, mean over the replicas.
        tokens_per_s: prompt and sampled tokens per busy second.
        queue_delay_s: estimated time until the shortest queue is computed; None if no replica's speed is known.
        fullest_kv_use: the same as `kv_use`, of the fullest partition of any replica: with data-parallel attention,
            the KV blocks of a rank.
    """

    model: str
    num_ready_replicas: int
    num_running: int
    num_waiting: int
    num_unplaced: int
    num_queued_tokens: int
    kv_use: float
    tokens_per_s: float
    queue_delay_s: float | None = None
    fullest_kv_use: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """A change of a deployment, a replica or a node.

    Attributes:
        time: Unix time at which the server learned of it, in seconds.
        object: its present state; of a replica without the figures.
        is_removed: it exists no more.
    """

    time: float
    object: DeploymentInfo | ReplicaInfo | NodeInfo
    is_removed: bool = False
