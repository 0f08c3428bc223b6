from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_STOPPED: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_STOPPED: ReplicaState
REPLICA_STATE_FAILED: ReplicaState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("replicas", "deployments", "nodes", "problem")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    problem: str
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class DeployRequest(_message.Message):
    __slots__ = ("deployment_json",)
    DEPLOYMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    deployment_json: str
    def __init__(self, deployment_json: _Optional[str] = ...) -> None: ...

class DeployResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("replica_ids",)
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("model", "version", "min_replicas", "max_replicas", "target_replicas", "reason", "problem")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    min_replicas: int
    max_replicas: int
    target_replicas: int
    reason: str
    problem: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., target_replicas: _Optional[int] = ..., reason: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "address", "draining", "resources")
    class ResourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    draining: bool
    resources: _containers.ScalarMap[str, float]
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., draining: _Optional[bool] = ..., resources: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "model", "ready", "problem", "ranks", "kv", "queue", "num_steps", "uptime_s", "state", "version", "node_ids", "mean_plan_wait_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_PLAN_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    model: str
    ready: bool
    problem: str
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    kv: KvUse
    queue: Queue
    num_steps: int
    uptime_s: float
    state: ReplicaState
    version: str
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    mean_plan_wait_s: float
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., problem: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., kv: _Optional[_Union[KvUse, _Mapping]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ..., num_steps: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., version: _Optional[str] = ..., node_ids: _Optional[_Iterable[str]] = ..., mean_plan_wait_s: _Optional[float] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "pid", "node", "device", "stage")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    node: str
    device: str
    stage: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., stage: _Optional[str] = ...) -> None: ...

class KvUse(_message.Message):
    __slots__ = ("block_size", "num_blocks", "num_used_blocks", "num_cached_blocks", "peak_used_blocks", "num_used_tokens", "mean_kv_fragmentation", "prefix_query_tokens", "prefix_hit_tokens", "num_host_blocks", "num_used_host_blocks", "num_cached_host_blocks", "num_swapped_blocks")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_KV_FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    peak_used_blocks: int
    num_used_tokens: int
    mean_kv_fragmentation: float
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_cached_host_blocks: int
    num_swapped_blocks: int
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., peak_used_blocks: _Optional[int] = ..., num_used_tokens: _Optional[int] = ..., mean_kv_fragmentation: _Optional[float] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_used_host_blocks: _Optional[int] = ..., num_cached_host_blocks: _Optional[int] = ..., num_swapped_blocks: _Optional[int] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("num_waiting", "num_running", "num_finished", "num_preemptions")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    num_finished: int
    num_preemptions: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...
