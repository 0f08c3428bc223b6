from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_KILL: _ClassVar[FaultKind]
    FAULT_KIND_STOP: _ClassVar[FaultKind]
    FAULT_KIND_EXCEPTION: _ClassVar[FaultKind]
    FAULT_KIND_SLOW: _ClassVar[FaultKind]
    FAULT_KIND_POISON: _ClassVar[FaultKind]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_STOPPED: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_ABORT: PauseMode
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_KILL: FaultKind
FAULT_KIND_STOP: FaultKind
FAULT_KIND_EXCEPTION: FaultKind
FAULT_KIND_SLOW: FaultKind
FAULT_KIND_POISON: FaultKind
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_STOPPED: ReplicaState
REPLICA_STATE_FAILED: ReplicaState

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path", "model", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ..., replace: _Optional[bool] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[LoraAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[LoraAdapter, _Mapping]]] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("model", "level", "mode")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    model: str
    level: int
    mode: PauseMode
    def __init__(self, model: _Optional[str] = ..., level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ("model", "tags")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ...) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("model", "mode")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    model: str
    mode: PauseMode
    def __init__(self, model: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("model", "path", "version", "mode")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    model: str
    path: str
    version: str
    mode: PauseMode
    def __init__(self, model: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("cached",)
    CACHED_FIELD_NUMBER: _ClassVar[int]
    cached: bool
    def __init__(self, cached: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("replicas", "deployments", "nodes", "problem", "traffic")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    deployments: _containers.RepeatedCompositeFieldContainer[DeploymentStatus]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    problem: str
    traffic: _containers.RepeatedCompositeFieldContainer[ModelTraffic]
    def __init__(self, replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., deployments: _Optional[_Iterable[_Union[DeploymentStatus, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., problem: _Optional[str] = ..., traffic: _Optional[_Iterable[_Union[ModelTraffic, _Mapping]]] = ...) -> None: ...

class ModelTraffic(_message.Message):
    __slots__ = ("model", "seconds", "num_open", "num_unplaced", "prompt_tokens_per_s", "generated_tokens_per_s", "completions_per_s", "errors_per_s", "first_token", "inter_token", "generated_tokens_per_s_history")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPLACED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ERRORS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_HISTORY_FIELD_NUMBER: _ClassVar[int]
    model: str
    seconds: float
    num_open: int
    num_unplaced: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    completions_per_s: float
    errors_per_s: float
    first_token: LatencyQuantiles
    inter_token: LatencyQuantiles
    generated_tokens_per_s_history: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, model: _Optional[str] = ..., seconds: _Optional[float] = ..., num_open: _Optional[int] = ..., num_unplaced: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., generated_tokens_per_s: _Optional[float] = ..., completions_per_s: _Optional[float] = ..., errors_per_s: _Optional[float] = ..., first_token: _Optional[_Union[LatencyQuantiles, _Mapping]] = ..., inter_token: _Optional[_Union[LatencyQuantiles, _Mapping]] = ..., generated_tokens_per_s_history: _Optional[_Iterable[float]] = ...) -> None: ...

class LatencyQuantiles(_message.Message):
    __slots__ = ("p50_s", "p99_s")
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    p50_s: float
    p99_s: float
    def __init__(self, p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class GetBlockMapRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class GetBlockMapResponse(_message.Message):
    __slots__ = ("num_blocks", "stride", "states", "rows", "sequences", "slot_states", "slot_rows")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SLOT_STATES_FIELD_NUMBER: _ClassVar[int]
    SLOT_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    stride: int
    states: bytes
    rows: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedCompositeFieldContainer[MappedSequence]
    slot_states: bytes
    slot_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_blocks: _Optional[int] = ..., stride: _Optional[int] = ..., states: _Optional[bytes] = ..., rows: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[_Union[MappedSequence, _Mapping]]] = ..., slot_states: _Optional[bytes] = ..., slot_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class MappedSequence(_message.Message):
    __slots__ = ("row", "request_id", "num_blocks", "num_tokens", "num_prompt_tokens")
    ROW_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    row: int
    request_id: str
    num_blocks: int
    num_tokens: int
    num_prompt_tokens: int
    def __init__(self, row: _Optional[int] = ..., request_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class DeployRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: Deployment
    def __init__(self, deployment: _Optional[_Union[Deployment, _Mapping]] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("engine", "limits", "rank_resources", "drain_grace_s", "weights_version", "spot", "prefill_replicas", "decode_replicas", "max_prefill_replicas", "max_decode_replicas", "prefill_tensor_parallel_size", "decode_tensor_parallel_size")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RANK_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPOT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_DECODE_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DECODE_TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    engine: EngineOptions
    limits: ScalingLimits
    rank_resources: _containers.RepeatedCompositeFieldContainer[NamedAmount]
    drain_grace_s: float
    weights_version: str
    spot: str
    prefill_replicas: int
    decode_replicas: int
    max_prefill_replicas: int
    max_decode_replicas: int
    prefill_tensor_parallel_size: int
    decode_tensor_parallel_size: int
    def __init__(self, engine: _Optional[_Union[EngineOptions, _Mapping]] = ..., limits: _Optional[_Union[ScalingLimits, _Mapping]] = ..., rank_resources: _Optional[_Iterable[_Union[NamedAmount, _Mapping]]] = ..., drain_grace_s: _Optional[float] = ..., weights_version: _Optional[str] = ..., spot: _Optional[str] = ..., prefill_replicas: _Optional[int] = ..., decode_replicas: _Optional[int] = ..., max_prefill_replicas: _Optional[int] = ..., max_decode_replicas: _Optional[int] = ..., prefill_tensor_parallel_size: _Optional[int] = ..., decode_tensor_parallel_size: _Optional[int] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("model", "served_model_name", "tensor_parallel_size", "device", "dtype", "quantization", "max_model_len", "block_size", "kv_cache_memory", "num_kv_blocks", "num_host_kv_blocks", "kv_cache_dtype", "prefix_caching", "batch_invariant", "fused_all_reduce", "cuda_graphs", "max_num_seqs", "max_num_batched_tokens", "max_queue_len", "policy", "tenant_weights", "step_timeout_s", "audit", "seed", "gpu_memory_utilization", "max_steps_in_flight", "chat_template", "trust_request_chat_template", "tool_call_parser", "reasoning_parser", "max_logprobs", "revision", "structured_outputs_backend", "disable_any_whitespace", "disable_additional_properties", "speculative_config", "attention_backend", "enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras", "runner", "spare_processes", "logits_processors", "enable_expert_parallel", "standby_weights", "enable_dp_attention", "lora_target_modules", "skip_tokenizer_init", "kv_events", "kv_events_replay", "kv_events_topic", "num_state_slots", "pipeline_parallel_size", "limit_mm_per_prompt", "mm_processor_kwargs", "allowed_media_domains", "language_model_only", "encoder_cache_memory", "kv_transfer", "kv_disk", "kv_shared", "kv_key", "linear_backend", "role", "all2all_backend", "enable_eplb", "num_redundant_experts", "eplb_step_interval", "moe_backend", "all_reduce_backend", "linear_attention_backend", "num_host_state_slots", "weights_from_peers", "mamba_ssm_cache_dtype", "dp_attention_size", "mm_encoder_tp_mode", "record_steps", "kv_transport")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    FUSED_ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    CUDA_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TRUST_REQUEST_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_BACKEND_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ADDITIONAL_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ENABLE_LORA_FIELD_NUMBER: _ClassVar[int]
    LORA_MODULES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_CPU_LORAS_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    SPARE_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    STANDBY_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_DP_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LORA_TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENIZER_INIT_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_REPLAY_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_TOPIC_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MM_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MM_PROCESSOR_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_MEDIA_DOMAINS_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_MODEL_ONLY_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    KV_DISK_FIELD_NUMBER: _ClassVar[int]
    KV_SHARED_FIELD_NUMBER: _ClassVar[int]
    KV_KEY_FIELD_NUMBER: _ClassVar[int]
    LINEAR_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ALL2ALL_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ENABLE_EPLB_FIELD_NUMBER: _ClassVar[int]
    NUM_REDUNDANT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EPLB_STEP_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MOE_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_BACKEND_FIELD_NUMBER: _ClassVar[int]
    LINEAR_ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FROM_PEERS_FIELD_NUMBER: _ClassVar[int]
    MAMBA_SSM_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DP_ATTENTION_SIZE_FIELD_NUMBER: _ClassVar[int]
    MM_ENCODER_TP_MODE_FIELD_NUMBER: _ClassVar[int]
    RECORD_STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    model: str
    served_model_name: str
    tensor_parallel_size: int
    device: str
    dtype: str
    quantization: str
    max_model_len: int
    block_size: int
    kv_cache_memory: int
    num_kv_blocks: int
    num_host_kv_blocks: int
    kv_cache_dtype: str
    prefix_caching: bool
    batch_invariant: bool
    fused_all_reduce: bool
    cuda_graphs: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int
    policy: str
    tenant_weights: _containers.RepeatedCompositeFieldContainer[NamedAmount]
    step_timeout_s: float
    audit: bool
    seed: int
    gpu_memory_utilization: float
    max_steps_in_flight: int
    chat_template: str
    trust_request_chat_template: bool
    tool_call_parser: str
    reasoning_parser: str
    max_logprobs: int
    revision: str
    structured_outputs_backend: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    speculative_config: str
    attention_backend: str
    enable_lora: bool
    lora_modules: _containers.RepeatedCompositeFieldContainer[NamedText]
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    runner: str
    spare_processes: int
    logits_processors: str
    enable_expert_parallel: bool
    standby_weights: bool
    enable_dp_attention: bool
    lora_target_modules: str
    skip_tokenizer_init: bool
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    num_state_slots: int
    pipeline_parallel_size: int
    limit_mm_per_prompt: str
    mm_processor_kwargs: str
    allowed_media_domains: str
    language_model_only: bool
    encoder_cache_memory: int
    kv_transfer: bool
    kv_disk: str
    kv_shared: str
    kv_key: str
    linear_backend: str
    role: str
    all2all_backend: str
    enable_eplb: bool
    num_redundant_experts: int
    eplb_step_interval: int
    moe_backend: str
    all_reduce_backend: str
    linear_attention_backend: str
    num_host_state_slots: int
    weights_from_peers: bool
    mamba_ssm_cache_dtype: str
    dp_attention_size: int
    mm_encoder_tp_mode: str
    record_steps: str
    kv_transport: str
    def __init__(self, model: _Optional[str] = ..., served_model_name: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_cache_memory: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., num_host_kv_blocks: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., prefix_caching: _Optional[bool] = ..., batch_invariant: _Optional[bool] = ..., fused_all_reduce: _Optional[bool] = ..., cuda_graphs: _Optional[bool] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_queue_len: _Optional[int] = ..., policy: _Optional[str] = ..., tenant_weights: _Optional[_Iterable[_Union[NamedAmount, _Mapping]]] = ..., step_timeout_s: _Optional[float] = ..., audit: _Optional[bool] = ..., seed: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., max_steps_in_flight: _Optional[int] = ..., chat_template: _Optional[str] = ..., trust_request_chat_template: _Optional[bool] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., max_logprobs: _Optional[int] = ..., revision: _Optional[str] = ..., structured_outputs_backend: _Optional[str] = ..., disable_any_whitespace: _Optional[bool] = ..., disable_additional_properties: _Optional[bool] = ..., speculative_config: _Optional[str] = ..., attention_backend: _Optional[str] = ..., enable_lora: _Optional[bool] = ..., lora_modules: _Optional[_Iterable[_Union[NamedText, _Mapping]]] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., max_cpu_loras: _Optional[int] = ..., runner: _Optional[str] = ..., spare_processes: _Optional[int] = ..., logits_processors: _Optional[str] = ..., enable_expert_parallel: _Optional[bool] = ..., standby_weights: _Optional[bool] = ..., enable_dp_attention: _Optional[bool] = ..., lora_target_modules: _Optional[str] = ..., skip_tokenizer_init: _Optional[bool] = ..., kv_events: _Optional[str] = ..., kv_events_replay: _Optional[str] = ..., kv_events_topic: _Optional[str] = ..., num_state_slots: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., limit_mm_per_prompt: _Optional[str] = ..., mm_processor_kwargs: _Optional[str] = ..., allowed_media_domains: _Optional[str] = ..., language_model_only: _Optional[bool] = ..., encoder_cache_memory: _Optional[int] = ..., kv_transfer: _Optional[bool] = ..., kv_disk: _Optional[str] = ..., kv_shared: _Optional[str] = ..., kv_key: _Optional[str] = ..., linear_backend: _Optional[str] = ..., role: _Optional[str] = ..., all2all_backend: _Optional[str] = ..., enable_eplb: _Optional[bool] = ..., num_redundant_experts: _Optional[int] = ..., eplb_step_interval: _Optional[int] = ..., moe_backend: _Optional[str] = ..., all_reduce_backend: _Optional[str] = ..., linear_attention_backend: _Optional[str] = ..., num_host_state_slots: _Optional[int] = ..., weights_from_peers: _Optional[bool] = ..., mamba_ssm_cache_dtype: _Optional[str] = ..., dp_attention_size: _Optional[int] = ..., mm_encoder_tp_mode: _Optional[str] = ..., record_steps: _Optional[str] = ..., kv_transport: _Optional[str] = ...) -> None: ...

class NamedText(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class NamedAmount(_message.Message):
    __slots__ = ("name", "amount")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    amount: float
    def __init__(self, name: _Optional[str] = ..., amount: _Optional[float] = ...) -> None: ...

class ScalingLimits(_message.Message):
    __slots__ = ("min_replicas", "max_replicas", "target_wait_s", "target_use", "target_memory_use", "up_delay_s", "down_delay_s", "max_step_up", "max_step_down", "cooldown_s", "idle_timeout_s", "cold_start_s")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_USE_FIELD_NUMBER: _ClassVar[int]
    TARGET_MEMORY_USE_FIELD_NUMBER: _ClassVar[int]
    UP_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_DOWN_FIELD_NUMBER: _ClassVar[int]
    COOLDOWN_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    COLD_START_S_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    max_replicas: int
    target_wait_s: float
    target_use: float
    target_memory_use: float
    up_delay_s: float
    down_delay_s: float
    max_step_up: int
    max_step_down: int
    cooldown_s: float
    idle_timeout_s: float
    cold_start_s: float
    def __init__(self, min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., target_wait_s: _Optional[float] = ..., target_use: _Optional[float] = ..., target_memory_use: _Optional[float] = ..., up_delay_s: _Optional[float] = ..., down_delay_s: _Optional[float] = ..., max_step_up: _Optional[int] = ..., max_step_down: _Optional[int] = ..., cooldown_s: _Optional[float] = ..., idle_timeout_s: _Optional[float] = ..., cold_start_s: _Optional[float] = ...) -> None: ...

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

class UndrainRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("replica_ids",)
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetScaleRequest(_message.Message):
    __slots__ = ("model", "min_replicas", "max_replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    min_replicas: int
    max_replicas: int
    def __init__(self, model: _Optional[str] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ...) -> None: ...

class SetScaleResponse(_message.Message):
    __slots__ = ("min_replicas", "max_replicas")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    max_replicas: int
    def __init__(self, min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("replica_ids",)
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class InjectFaultRequest(_message.Message):
    __slots__ = ("replica_id", "rank", "kind", "delay_s", "duration_s", "token_id")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    rank: int
    kind: FaultKind
    delay_s: float
    duration_s: float
    token_id: int
    def __init__(self, replica_id: _Optional[str] = ..., rank: _Optional[int] = ..., kind: _Optional[_Union[FaultKind, str]] = ..., delay_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., token_id: _Optional[int] = ...) -> None: ...

class InjectFaultResponse(_message.Message):
    __slots__ = ("replica_id", "pid")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    pid: int
    def __init__(self, replica_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "num_ready_replicas", "num_running", "num_waiting", "num_unplaced", "num_queued_tokens", "kv_use", "tokens_per_s", "queue_delay_s", "fullest_kv_use")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    FULLEST_KV_USE_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_ready_replicas: int
    num_running: int
    num_waiting: int
    num_unplaced: int
    num_queued_tokens: int
    kv_use: float
    tokens_per_s: float
    queue_delay_s: float
    fullest_kv_use: float
    def __init__(self, model: _Optional[str] = ..., num_ready_replicas: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_unplaced: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., kv_use: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., queue_delay_s: _Optional[float] = ..., fullest_kv_use: _Optional[float] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("time", "deployment", "replica", "node", "removed")
    TIME_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    time: float
    deployment: DeploymentStatus
    replica: Replica
    node: Node
    removed: bool
    def __init__(self, time: _Optional[float] = ..., deployment: _Optional[_Union[DeploymentStatus, _Mapping]] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., removed: _Optional[bool] = ...) -> None: ...

class DeploymentStatus(_message.Message):
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
    __slots__ = ("replica_id", "model", "ready", "problem", "ranks", "kv", "queue", "num_steps", "uptime_s", "state", "version", "node_ids", "mean_plan_wait_s", "silence_s", "num_computed_tokens", "busy_s", "queued_tokens", "oldest_wait_s", "tokens_per_s", "num_compilations", "activity", "activity_s", "num_recoveries", "weights_version", "paused", "sleep_level", "role", "prefill_tokens_per_s")
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
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
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
    silence_s: float
    num_computed_tokens: int
    busy_s: float
    queued_tokens: int
    oldest_wait_s: float
    tokens_per_s: float
    num_compilations: int
    activity: str
    activity_s: float
    num_recoveries: int
    weights_version: str
    paused: bool
    sleep_level: int
    role: str
    prefill_tokens_per_s: float
    def __init__(self, replica_id: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., problem: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., kv: _Optional[_Union[KvUse, _Mapping]] = ..., queue: _Optional[_Union[Queue, _Mapping]] = ..., num_steps: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., version: _Optional[str] = ..., node_ids: _Optional[_Iterable[str]] = ..., mean_plan_wait_s: _Optional[float] = ..., silence_s: _Optional[float] = ..., num_computed_tokens: _Optional[int] = ..., busy_s: _Optional[float] = ..., queued_tokens: _Optional[int] = ..., oldest_wait_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., num_compilations: _Optional[int] = ..., activity: _Optional[str] = ..., activity_s: _Optional[float] = ..., num_recoveries: _Optional[int] = ..., weights_version: _Optional[str] = ..., paused: _Optional[bool] = ..., sleep_level: _Optional[int] = ..., role: _Optional[str] = ..., prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "pid", "node", "device", "stage", "times")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    node: str
    device: str
    stage: str
    times: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., stage: _Optional[str] = ..., times: _Optional[str] = ...) -> None: ...

class KvUse(_message.Message):
    __slots__ = ("block_size", "num_blocks", "num_used_blocks", "num_cached_blocks", "peak_used_blocks", "num_used_tokens", "mean_kv_fragmentation", "prefix_query_tokens", "prefix_hit_tokens", "num_host_blocks", "num_used_host_blocks", "num_cached_host_blocks", "num_swapped_blocks", "num_fenced_blocks", "fullest_kv_use", "num_state_slots", "num_used_state_slots", "num_snapshots", "num_saved_snapshots", "num_kv_leases", "num_kv_offers", "num_kv_pulls", "num_kv_pulled_tokens", "num_kv_pulled_bytes", "num_kv_failures", "num_disk_blocks", "num_shared_blocks", "disk_bytes", "shared_bytes", "num_read_blocks", "num_written_blocks", "num_corrupt_blocks", "num_failed_reads", "num_late_reads", "stored_hit_tokens", "read_blocks_per_s", "num_kv_recomputed_tokens", "kv_pull_bytes_per_s", "kv_token_bytes", "num_host_state_slots", "num_host_snapshots", "num_kv_ahead_tokens", "num_split_prompts")
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
    NUM_FENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FULLEST_KV_USE_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVED_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_OFFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_PULLS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_READS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_READS_FIELD_NUMBER: _ClassVar[int]
    STORED_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BLOCKS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_PULL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPLIT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
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
    num_fenced_blocks: int
    fullest_kv_use: float
    num_state_slots: int
    num_used_state_slots: int
    num_snapshots: int
    num_saved_snapshots: int
    num_kv_leases: int
    num_kv_offers: int
    num_kv_pulls: int
    num_kv_pulled_tokens: int
    num_kv_pulled_bytes: int
    num_kv_failures: _containers.RepeatedScalarFieldContainer[int]
    num_disk_blocks: int
    num_shared_blocks: int
    disk_bytes: int
    shared_bytes: int
    num_read_blocks: int
    num_written_blocks: int
    num_corrupt_blocks: int
    num_failed_reads: int
    num_late_reads: int
    stored_hit_tokens: int
    read_blocks_per_s: float
    num_kv_recomputed_tokens: int
    kv_pull_bytes_per_s: float
    kv_token_bytes: float
    num_host_state_slots: int
    num_host_snapshots: int
    num_kv_ahead_tokens: int
    num_split_prompts: int
    def __init__(self, block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., peak_used_blocks: _Optional[int] = ..., num_used_tokens: _Optional[int] = ..., mean_kv_fragmentation: _Optional[float] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_used_host_blocks: _Optional[int] = ..., num_cached_host_blocks: _Optional[int] = ..., num_swapped_blocks: _Optional[int] = ..., num_fenced_blocks: _Optional[int] = ..., fullest_kv_use: _Optional[float] = ..., num_state_slots: _Optional[int] = ..., num_used_state_slots: _Optional[int] = ..., num_snapshots: _Optional[int] = ..., num_saved_snapshots: _Optional[int] = ..., num_kv_leases: _Optional[int] = ..., num_kv_offers: _Optional[int] = ..., num_kv_pulls: _Optional[int] = ..., num_kv_pulled_tokens: _Optional[int] = ..., num_kv_pulled_bytes: _Optional[int] = ..., num_kv_failures: _Optional[_Iterable[int]] = ..., num_disk_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., num_read_blocks: _Optional[int] = ..., num_written_blocks: _Optional[int] = ..., num_corrupt_blocks: _Optional[int] = ..., num_failed_reads: _Optional[int] = ..., num_late_reads: _Optional[int] = ..., stored_hit_tokens: _Optional[int] = ..., read_blocks_per_s: _Optional[float] = ..., num_kv_recomputed_tokens: _Optional[int] = ..., kv_pull_bytes_per_s: _Optional[float] = ..., kv_token_bytes: _Optional[float] = ..., num_host_state_slots: _Optional[int] = ..., num_host_snapshots: _Optional[int] = ..., num_kv_ahead_tokens: _Optional[int] = ..., num_split_prompts: _Optional[int] = ...) -> None: ...

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
