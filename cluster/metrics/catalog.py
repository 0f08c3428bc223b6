"""Every metric of a gateway.

Names that begin with ``vllm:`` mean the same as in vLLM, so that its dashboards, scalers and gateways work.
``engine`` is the id of a replica. Labels are model names, replica ids, ranks and fixed words: no metric has a label
for requests, tenants or texts.
"""

from __future__ import annotations

from .definition import MODEL, REPLICA, Kind, Metric, decades, powers_of_two

OF_REPLICA = (MODEL, REPLICA)
# Prompts, outputs and waits of up to 1,000 s; gaps between tokens of 0.5 ms to 10 s.
SECONDS = decades(0.001, 1000.0)
GAP_SECONDS = decades(0.0005, 10.0)
TOKENS = powers_of_two(1 << 20)

# Replicas, from the status that each sends once per second

REQUESTS_RUNNING = Metric(
    name="vllm:num_requests_running",
    kind=Kind.GAUGE,
    help="Sequences that have a row and KV blocks.",
    labels=OF_REPLICA,
)
REQUESTS_WAITING = Metric(
    name="vllm:num_requests_waiting",
    kind=Kind.GAUGE,
    help="Sequences that wait for a row or for KV blocks.",
    labels=OF_REPLICA,
)
KV_USAGE = Metric(
    name="vllm:kv_cache_usage_perc",
    kind=Kind.GAUGE,
    help="Share of the KV blocks that sequences hold; cached blocks are free.",
    unit="percentunit",
    labels=OF_REPLICA,
)
PREFIX_QUERIES = Metric(
    name="vllm:prefix_cache_queries",
    kind=Kind.COUNTER,
    help="Prompt tokens that were looked up in the prefix cache.",
    labels=OF_REPLICA,
)
PREFIX_HITS = Metric(
    name="vllm:prefix_cache_hits",
    kind=Kind.COUNTER,
    help="Prompt tokens that were found in the prefix cache.",
    labels=OF_REPLICA,
)
PREEMPTIONS = Metric(
    name="vllm:num_preemptions",
    kind=Kind.COUNTER,
    help="Running sequences that lost their blocks to others and resumed later.",
    labels=OF_REPLICA,
)
CACHE_CONFIG = Metric(
    name="vllm:cache_config_info",
    kind=Kind.GAUGE,
    help="Always 1; the labels describe the KV cache.",
    labels=(
        *OF_REPLICA,
        "block_size",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
    ),
)
REPLICA_READY = Metric(
    name="quire_replica_ready",
    kind=Kind.GAUGE,
    help="1 if the gateway sends the replica requests: it answers, and a canary token came through all ranks.",
    labels=OF_REPLICA,
)
REPLICA_DRAINING = Metric(
    name="quire_replica_draining", kind=Kind.GAUGE, help="1 while the replica drains.", labels=OF_REPLICA
)
REPLICA_SILENCE = Metric(
    name="quire_replica_silence_seconds",
    kind=Kind.GAUGE,
    help="Time since the replica's latest message; its status is due every second.",
    unit="s",
    labels=OF_REPLICA,
)
REPLICA_UPTIME = Metric(
    name="quire_replica_uptime_seconds",
    kind=Kind.GAUGE,
    help="Time since the replica's scheduler started.",
    unit="s",
    labels=OF_REPLICA,
)
STEPS = Metric(
    name="quire_steps", kind=Kind.COUNTER, help="Steps that the scheduler planned.", labels=OF_REPLICA
)
STEP_SECONDS = Metric(
    name="quire_step_seconds",
    kind=Kind.COUNTER,
    help="Time in which at least one step was computed; its rate is the share of time that the replica is busy.",
    unit="s",
    labels=OF_REPLICA,
)
COMPUTED_TOKENS = Metric(
    name="quire_computed_tokens",
    kind=Kind.COUNTER,
    help="Tokens that steps computed: of prompts, sampled, and computed again after preemptions and moves.",
    labels=OF_REPLICA,
)
PLAN_WAITS = Metric(
    name="quire_plan_waits",
    kind=Kind.COUNTER,
    help="Steps that followed another one without idle time between.",
    labels=OF_REPLICA,
)
PLAN_WAIT_SECONDS = Metric(
    name="quire_plan_wait_seconds",
    kind=Kind.COUNTER,
    help="Time that rank 0 waited for the plans of these steps: the scheduler's cost.",
    unit="s",
    labels=OF_REPLICA,
)
KV_BLOCKS = Metric(
    name="quire_kv_blocks",
    kind=Kind.GAUGE,
    help="KV blocks by state: active (held by sequences), fenced (freed, a step may still read them), cached (free, "
    "with content of the prefix cache) and empty.",
    labels=(*OF_REPLICA, "state"),
)
KV_TOKENS = Metric(
    name="quire_kv_tokens",
    kind=Kind.GAUGE,
    help="Tokens whose KV running sequences hold; a shared block counts for each.",
    labels=OF_REPLICA,
)
KV_FRAGMENTATION = Metric(
    name="quire_kv_fragmentation",
    kind=Kind.GAUGE,
    help="Share of the allocated KV slots that held no token, mean over all steps.",
    unit="percentunit",
    labels=OF_REPLICA,
)
HOST_BLOCKS = Metric(
    name="quire_host_kv_blocks",
    kind=Kind.GAUGE,
    help="KV blocks of host memory by state: active (of preempted sequences), cached and empty.",
    labels=(*OF_REPLICA, "state"),
)
SWAPPED_BLOCKS = Metric(
    name="quire_swapped_kv_blocks",
    kind=Kind.COUNTER,
    help="KV blocks copied between device and host memory, in both directions.",
    labels=OF_REPLICA,
)
QUEUED_TOKENS = Metric(
    name="quire_queued_tokens",
    kind=Kind.GAUGE,
    help="Prompt tokens that are not planned yet, of waiting and of running sequences.",
    labels=OF_REPLICA,
)
OLDEST_WAIT = Metric(
    name="quire_oldest_wait_seconds",
    kind=Kind.GAUGE,
    help="Longest time that a sequence has waited for its first row.",
    unit="s",
    labels=OF_REPLICA,
)
RANK_INFO = Metric(
    name="quire_rank_info",
    kind=Kind.GAUGE,
    help="Always 1; the labels say where a rank runs.",
    labels=(*OF_REPLICA, "rank", "node", "device"),
)
RANK_MEMORY = Metric(
    name="quire_rank_resident_memory_bytes",
    kind=Kind.GAUGE,
    help="Resident memory of a rank's process, if it runs on the gateway's machine.",
    unit="bytes",
    labels=(*OF_REPLICA, "rank"),
)
RANK_CPU = Metric(
    name="quire_rank_cpu_seconds",
    kind=Kind.COUNTER,
    help="CPU time of a rank's process, if it runs on the gateway's machine.",
    unit="s",
    labels=(*OF_REPLICA, "rank"),
)

# Requests, as the gateway observes them

PROMPT_TOKENS = Metric(
    name="vllm:prompt_tokens",
    kind=Kind.COUNTER,
    help="Prompt tokens of requests whose first token came, found in the prefix cache or computed.",
)
CACHED_PROMPT_TOKENS = Metric(
    name="vllm:prompt_tokens_cached",
    kind=Kind.COUNTER,
    help="Prompt tokens of finished completions that were found in the prefix cache.",
)
GENERATION_TOKENS = Metric(
    name="vllm:generation_tokens", kind=Kind.COUNTER, help="Tokens that were sent to callers."
)
REQUEST_SUCCESS = Metric(
    name="vllm:request_success",
    kind=Kind.COUNTER,
    help="Completions that ended, by reason: stop, length, abort (its caller left or aborted it) and error.",
    labels=(MODEL, "finished_reason"),
)
TIME_TO_FIRST_TOKEN = Metric(
    name="vllm:time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a request's arrival at the gateway to its first token.",
    unit="s",
    buckets=SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    name="vllm:inter_token_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Time between two tokens of a completion; tokens that came together share the time.",
    unit="s",
    buckets=GAP_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    name="vllm:request_time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    help="Mean time between two tokens, once per completion.",
    unit="s",
    buckets=GAP_SECONDS,
)
E2E_LATENCY = Metric(
    name="vllm:e2e_request_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a request's arrival to the end of each completion.",
    unit="s",
    buckets=SECONDS,
)
QUEUE_TIME = Metric(
    name="vllm:request_queue_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time that a completion waited before its first step.",
    unit="s",
    buckets=SECONDS,
)
PREFILL_TIME = Metric(
    name="vllm:request_prefill_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first step to its first token.",
    unit="s",
    buckets=SECONDS,
)
DECODE_TIME = Metric(
    name="vllm:request_decode_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first token to its last.",
    unit="s",
    buckets=SECONDS,
)
INFERENCE_TIME = Metric(
    name="vllm:request_inference_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first step to its last token.",
    unit="s",
    buckets=SECONDS,
)
REQUEST_PROMPT_TOKENS = Metric(
    name="vllm:request_prompt_tokens",
    kind=Kind.HISTOGRAM,
    help="Prompt tokens per completion.",
    buckets=TOKENS,
)
REQUEST_GENERATION_TOKENS = Metric(
    name="vllm:request_generation_tokens",
    kind=Kind.HISTOGRAM,
    help="Generated tokens per completion.",
    buckets=TOKENS,
)
REQUEST_PARAMS_N = Metric(
    name="vllm:request_params_n",
    kind=Kind.HISTOGRAM,
    help="The parameter n of requests.",
    buckets=powers_of_two(128),
)
REQUEST_PARAMS_MAX_TOKENS = Metric(
    name="vllm:request_params_max_tokens",
    kind=Kind.HISTOGRAM,
    help="The parameter max_tokens of requests.",
    buckets=TOKENS,
)
PREEMPTED_SECONDS = Metric(
    name="quire_request_preempted_seconds",
    kind=Kind.COUNTER,
    help="Time that completions spent preempted or between two replicas.",
    unit="s",
)
RECOMPUTED_TOKENS = Metric(
    name="quire_recomputed_tokens",
    kind=Kind.COUNTER,
    help="Tokens that were computed again after preemptions and moves.",
)
MOVES = Metric(
    name="quire_request_moves",
    kind=Kind.COUNTER,
    help="Sequences that a replica lost before their end, by cause: drain or failure. Another one continues them.",
    labels=(MODEL, "cause"),
)
RECOVERIES = Metric(
    name="quire_request_recoveries",
    kind=Kind.COUNTER,
    help="Completions that ended well although a replica had lost them.",
)
REFUSALS = Metric(
    name="quire_request_refusals",
    kind=Kind.COUNTER,
    help="Requests that were refused before they began, by the kind of error.",
    labels=("reason",),
)
ERRORS = Metric(
    name="quire_request_errors",
    kind=Kind.COUNTER,
    help="Requests that had begun and ended with an error, by its kind.",
    labels=(MODEL, "reason"),
)

# The gateway and its fleet

GATEWAY_WAITING = Metric(
    name="quire_gateway_waiting_requests",
    kind=Kind.GAUGE,
    help="Requests that wait in this gateway for a replica. Not part of vllm:num_requests_waiting.",
)
GATEWAY_RUNNING = Metric(
    name="quire_gateway_open_requests",
    kind=Kind.GAUGE,
    help="Requests of this gateway that have not ended.",
)
FLEET_TARGET = Metric(
    name="quire_fleet_target_replicas", kind=Kind.GAUGE, help="Replicas that the autoscaler wants."
)
FLEET_MIN = Metric(name="quire_fleet_min_replicas", kind=Kind.GAUGE, help="Lower bound of the target.")
FLEET_MAX = Metric(name="quire_fleet_max_replicas", kind=Kind.GAUGE, help="Upper bound of the target.")
FLEET_REPLICAS = Metric(
    name="quire_fleet_replicas",
    kind=Kind.GAUGE,
    help="Replicas of the fleet by state.",
    labels=(MODEL, "state"),
)
FLEET_REASON = Metric(
    name="quire_fleet_target_reason",
    kind=Kind.GAUGE,
    help="1 for the kind of reason of the present target.",
    labels=(MODEL, "reason"),
)
FLEET_STALE = Metric(
    name="quire_fleet_state_stale",
    kind=Kind.GAUGE,
    help="1 while the fleet's controller does not answer, so that the figures of the fleet may be old.",
    labels=(),
)
FLEET_NODES = Metric(
    name="quire_fleet_nodes", kind=Kind.GAUGE, help="Nodes of the cluster by state.", labels=("state",)
)

ALL: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
