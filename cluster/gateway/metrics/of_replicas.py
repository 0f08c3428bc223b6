"""Metrics of replicas, from the status that each sends once per second."""

from __future__ import annotations

from .definition import MODEL, REPLICA, Kind, Metric

OF_REPLICA = (MODEL, REPLICA)

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
FULLEST_KV_USAGE = Metric(
    name="quire_kv_cache_fullest_usage",
    kind=Kind.GAUGE,
    help="Share of its KV blocks that sequences hold, of the fullest partition; with data-parallel attention "
    "each rank has a partition, otherwise there is one.",
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
SPEC_DRAFTS = Metric(
    name="vllm:spec_decode_num_drafts",
    kind=Kind.COUNTER,
    help="Drafts that were verified, each of one sequence in one step.",
    labels=OF_REPLICA,
)
SPEC_DRAFT_TOKENS = Metric(
    name="vllm:spec_decode_num_draft_tokens",
    kind=Kind.COUNTER,
    help="Tokens of these drafts.",
    labels=OF_REPLICA,
)
SPEC_ACCEPTED_TOKENS = Metric(
    name="vllm:spec_decode_num_accepted_tokens",
    kind=Kind.COUNTER,
    help="Tokens of these drafts that were accepted.",
    labels=OF_REPLICA,
)
SPEC_ACCEPTED_PER_POSITION = Metric(
    name="vllm:spec_decode_num_accepted_tokens_per_pos",
    kind=Kind.COUNTER,
    help="Tokens of these drafts that were accepted, by their position in the draft, from 0.",
    labels=(*OF_REPLICA, "position"),
)
FORCED_TOKENS = Metric(
    name="quire_forced_tokens",
    kind=Kind.COUNTER,
    help="Tokens that a structured output left no choice of, and that were computed together with the token before "
    "them. With speculative decoding they are among the accepted tokens of drafts.",
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
COMPILATIONS = Metric(
    name="quire_kernel_compilations",
    kind=Kind.COUNTER,
    help="Kernel variants compiled since the replica was ready, each of which delays a step; 0 is expected.",
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
KEPT_TOKENS = Metric(
    name="quire_recovery_kept_tokens",
    kind=Kind.COUNTER,
    help="Tokens whose keys and values survived failures of the ranks, so that they were not computed again.",
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
