from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "model", "ready", "problem", "ranks", "kv", "queue", "num_steps", "uptime_s")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    model: str
    ready: bool
    problem: str
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    kv: KvUse
    queue: Queue
    num_steps: int
    uptime_s: float
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., problem: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., kv: _Optional[_Union[KvUse, _Mapping]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ..., num_steps: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("block_size", "num_blocks", "num_used_blocks", "num_cached_blocks", "peak_used_blocks", "num_used_tokens", "mean_waste", "prefix_query_tokens", "prefix_hit_tokens", "num_host_blocks", "num_used_host_blocks", "num_cached_host_blocks", "num_swapped_blocks")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEAK_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_WASTE_FIELD_NUMBER: _ClassVar[int]
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
    mean_waste: float
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_cached_host_blocks: int
    num_swapped_blocks: int
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., peak_used_blocks: _Optional[int] = ..., num_used_tokens: _Optional[int] = ..., mean_waste: _Optional[float] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_used_host_blocks: _Optional[int] = ..., num_cached_host_blocks: _Optional[int] = ..., num_swapped_blocks: _Optional[int] = ...) -> None: ...

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
