"""Metrics of replicas, from the status that each sends once per second."""

from __future__ import annotations

from collections.abc import Callable

from ....proto.replica_status import ReplicaStatus
from .definition import MODEL, REPLICA, Kind, Metric

OF_REPLICA = (MODEL, REPLICA)

# Metrics that are numbers of a status |-> the number; those of the second table only with speculative decoding.
OF_STATUS: dict[Metric, Callable[[ReplicaStatus], float]] = {}
OF_DRAFTS: dict[Metric, Callable[[ReplicaStatus], float]] = {}


def _add(
    table: dict[Metric, Callable[[ReplicaStatus], float]],
    value_of: Callable[[ReplicaStatus], float],
    *,
    name: str,
    kind: Kind,
    help: str,
    unit: str = "short",
) -> Metric:
    metric = Metric(name=name, kind=kind, help=help, unit=unit, labels=OF_REPLICA)
    table[metric] = value_of
    return metric


REQUESTS_RUNNING = _add(
    OF_STATUS,
    lambda status: status.num_running,
    name="vllm:num_requests_running",
    kind=Kind.GAUGE,
    help="Sequences that have a row and KV blocks.",
)
REQUESTS_WAITING = _add(
    OF_STATUS,
    lambda status: status.num_waiting,
    name="vllm:num_requests_waiting",
    kind=Kind.GAUGE,
    help="Sequences that wait for a row or for KV blocks.",
)
KV_USAGE = _add(
    OF_STATUS,
    lambda status: status.kv_use,
    name="vllm:kv_cache_usage_perc",
    kind=Kind.GAUGE,
    help="Share of the KV blocks that sequences hold; cached blocks are free.",
    unit="percentunit",
)
FULLEST_KV_USAGE = _add(
    OF_STATUS,
    lambda status: status.fullest_use,
    name="quire_kv_cache_fullest_usage",
    kind=Kind.GAUGE,
    help="Share of its KV blocks that sequences hold, of the fullest partition; with data-parallel attention "
    "each rank has a partition, otherwise there is one.",
    unit="percentunit",
)
PREFIX_QUERIES = _add(
    OF_STATUS,
    lambda status: status.prefix_query_tokens,
    name="vllm:prefix_cache_queries",
    kind=Kind.COUNTER,
    help="Prompt tokens that were looked up in the prefix cache.",
)
PREFIX_HITS = _add(
    OF_STATUS,
    lambda status: status.prefix_hit_tokens,
    name="vllm:prefix_cache_hits",
    kind=Kind.COUNTER,
    help="Prompt tokens that were found in the prefix cache.",
)
PREEMPTIONS = _add(
    OF_STATUS,
    lambda status: status.num_preemptions,
    name="vllm:num_preemptions",
    kind=Kind.COUNTER,
    help="Running sequences that lost their blocks to others and resumed later.",
)
SPEC_DRAFTS = _add(
    OF_DRAFTS,
    lambda status: status.num_drafts,
    name="vllm:spec_decode_num_drafts",
    kind=Kind.COUNTER,
    help="Drafts that were verified, each of one sequence in one step.",
)
SPEC_DRAFT_TOKENS = _add(
    OF_DRAFTS,
    lambda status: status.num_draft_tokens,
    name="vllm:spec_decode_num_draft_tokens",
    kind=Kind.COUNTER,
    help="Tokens of these drafts.",
)
SPEC_ACCEPTED_TOKENS = _add(
    OF_DRAFTS,
    lambda status: sum(status.num_accepted_tokens),
    name="vllm:spec_decode_num_accepted_tokens",
    kind=Kind.COUNTER,
    help="Tokens of these drafts that were accepted.",
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
REPLICA_DRAINING = _add(
    OF_STATUS,
    lambda status: status.draining,
    name="quire_replica_draining",
    kind=Kind.GAUGE,
    help="1 while the replica drains.",
)
REPLICA_SILENCE = Metric(
    name="quire_replica_silence_seconds",
    kind=Kind.GAUGE,
    help="Time since the replica's latest message; its status is due every second.",
    unit="s",
    labels=OF_REPLICA,
)
REPLICA_UPTIME = _add(
    OF_STATUS,
    lambda status: status.uptime_s,
    name="quire_replica_uptime_seconds",
    kind=Kind.GAUGE,
    help="Time since the replica's scheduler started.",
    unit="s",
)
STEPS = _add(
    OF_STATUS,
    lambda status: status.num_steps,
    name="quire_steps",
    kind=Kind.COUNTER,
    help="Steps that the scheduler planned.",
)
STEP_SECONDS = _add(
    OF_STATUS,
    lambda status: status.busy_s,
    name="quire_step_seconds",
    kind=Kind.COUNTER,
    help="Time in which at least one step was computed; its rate is the share of time that the replica is busy.",
    unit="s",
)
COMPUTED_TOKENS = _add(
    OF_STATUS,
    lambda status: status.num_computed_tokens,
    name="quire_computed_tokens",
    kind=Kind.COUNTER,
    help="Tokens that steps computed: of prompts, sampled, and computed again after preemptions and moves.",
)
PLAN_WAITS = _add(
    OF_STATUS,
    lambda status: status.num_plan_waits,
    name="quire_plan_waits",
    kind=Kind.COUNTER,
    help="Steps that followed another one without idle time between.",
)
PLAN_WAIT_SECONDS = _add(
    OF_STATUS,
    lambda status: status.plan_wait_s,
    name="quire_plan_wait_seconds",
    kind=Kind.COUNTER,
    help="Time that rank 0 waited for the plans of these steps: the scheduler's cost.",
    unit="s",
)
COMPILATIONS = _add(
    OF_STATUS,
    lambda status: status.num_compilations,
    name="quire_kernel_compilations",
    kind=Kind.COUNTER,
    help="Kernel variants compiled since the replica was ready, each of which delays a step; 0 is expected.",
)
KV_BLOCKS = Metric(
    name="quire_kv_blocks",
    kind=Kind.GAUGE,
    help="KV blocks by state: active (held by sequences), fenced (freed, a step may still read them), cached (free, "
    "with content of the prefix cache) and empty.",
    labels=(*OF_REPLICA, "state"),
)
KV_TOKENS = _add(
    OF_STATUS,
    lambda status: status.num_used_tokens,
    name="quire_kv_tokens",
    kind=Kind.GAUGE,
    help="Tokens whose KV running sequences hold; a shared block counts for each.",
)
KV_FRAGMENTATION = _add(
    OF_STATUS,
    lambda status: status.mean_kv_fragmentation,
    name="quire_kv_fragmentation",
    kind=Kind.GAUGE,
    help="Share of the allocated KV slots that held no token, mean over all steps.",
    unit="percentunit",
)
HOST_BLOCKS = Metric(
    name="quire_host_kv_blocks",
    kind=Kind.GAUGE,
    help="KV blocks of host memory by state: active (of preempted sequences), cached and empty.",
    labels=(*OF_REPLICA, "state"),
)
SWAPPED_BLOCKS = _add(
    OF_STATUS,
    lambda status: status.num_swapped_blocks,
    name="quire_swapped_kv_blocks",
    kind=Kind.COUNTER,
    help="KV blocks copied between device and host memory, in both directions.",
)
KEPT_TOKENS = _add(
    OF_STATUS,
    lambda status: status.num_retained_tokens,
    name="quire_recovery_kept_tokens",
    kind=Kind.COUNTER,
    help="Tokens whose keys and values survived failures of the ranks, so that they were not computed again.",
)
QUEUED_TOKENS = _add(
    OF_STATUS,
    lambda status: status.queued_tokens,
    name="quire_queued_tokens",
    kind=Kind.GAUGE,
    help="Prompt tokens that are not planned yet, of waiting and of running sequences.",
)
OLDEST_WAIT = _add(
    OF_STATUS,
    lambda status: status.oldest_wait_s,
    name="quire_oldest_wait_seconds",
    kind=Kind.GAUGE,
    help="Longest time that a sequence has waited for its first row.",
    unit="s",
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
