"""Metrics of replicas, from the status that each sends once per second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from ....proto.replica_status import ReplicaStatus
from .definition import MODEL, REPLICA, Metric, counter, gauge

OF_REPLICA = (MODEL, REPLICA)

# Metrics that are numbers of a status |-> the number; those of the second table only with speculative decoding.
OF_STATUS: dict[Metric, Callable[[ReplicaStatus], float]] = {}
OF_DRAFTS: dict[Metric, Callable[[ReplicaStatus], float]] = {}
# Of models that read images.
OF_IMAGES: dict[Metric, Callable[[ReplicaStatus], float]] = {}
# With KV that travels between replicas.
OF_KV_MOVES: dict[Metric, Callable[[ReplicaStatus], float]] = {}


def _number(
    kind: Callable[..., Metric],
    of: str | Callable[[ReplicaStatus], float],
    name: str,
    help: str,
    unit: str = "short",
    table: dict[Metric, Callable[[ReplicaStatus], float]] = OF_STATUS,
) -> Metric:
    """Declare a metric that is a number of a status, or follows from the status."""
    metric = kind(name, help, unit=unit, labels=OF_REPLICA)
    table[metric] = attrgetter(of) if isinstance(of, str) else of
    return metric


def _moved(kind: Callable[..., Metric], of: str, name: str, help: str, unit: str = "short") -> Metric:
    """Declare a metric of KV that travels."""
    return _number(kind, of, name, help, unit, OF_KV_MOVES)


_gauge, _counter = partial(_number, gauge), partial(_number, counter)

REQUESTS_RUNNING = _gauge(
    "num_running", "vllm:num_requests_running", "Sequences that have a row and KV blocks."
)
REQUESTS_WAITING = _gauge(
    "num_waiting", "vllm:num_requests_waiting", "Sequences that wait for a row or for KV blocks."
)
KV_USAGE = _gauge(
    "kv_use",
    "vllm:kv_cache_usage_perc",
    "Share of the KV blocks that sequences hold; cached blocks are free.",
    unit="percentunit",
)
FULLEST_KV_USAGE = _gauge(
    "fullest_use",
    "quire_kv_cache_fullest_usage",
    "Share of its KV blocks that sequences hold, of the fullest partition; with data-parallel attention "
    "each rank has a partition, otherwise there is one.",
    unit="percentunit",
)
PREFIX_QUERIES = _counter(
    "prefix_query_tokens",
    "vllm:prefix_cache_queries",
    "Prompt tokens that were looked up in the prefix cache.",
)
PREFIX_HITS = _counter(
    "prefix_hit_tokens", "vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."
)
PREEMPTIONS = _counter(
    "num_preemptions",
    "vllm:num_preemptions",
    "Running sequences that lost their blocks to others and resumed later.",
)
SPEC_DRAFTS = _counter(
    "num_drafts",
    "vllm:spec_decode_num_drafts",
    "Drafts that were verified, each of one sequence in one step.",
    table=OF_DRAFTS,
)
SPEC_DRAFT_TOKENS = _counter(
    "num_draft_tokens", "vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", table=OF_DRAFTS
)
SPEC_ACCEPTED_TOKENS = _counter(
    lambda status: sum(status.num_accepted_tokens),
    "vllm:spec_decode_num_accepted_tokens",
    "Tokens of these drafts that were accepted.",
    table=OF_DRAFTS,
)
SPEC_ACCEPTED_PER_POSITION = counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Tokens of these drafts that were accepted, by their position in the draft, from 0.",
    labels=(*OF_REPLICA, "position"),
)
FORCED_TOKENS = counter(
    "quire_forced_tokens",
    "Tokens that a structured output left no choice of, and that were computed together with the token "
    "before them. With speculative decoding they are among the accepted tokens of drafts.",
    labels=OF_REPLICA,
)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "Always 1; the labels describe the KV cache.",
    labels=(
        *OF_REPLICA,
        "block_size",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
    ),
)
REPLICA_READY = gauge(
    "quire_replica_ready",
    "1 if the gateway sends the replica requests: it answers, and a canary token came through all ranks.",
    labels=OF_REPLICA,
)
REPLICA_ROLE = gauge(
    "quire_replica_role",
    "Always 1; the label is the part of a request that the replica computes: both, prefill or decode.",
    labels=(*OF_REPLICA, "role"),
)
REPLICA_DRAINING = _gauge("draining", "quire_replica_draining", "1 while the replica drains.")
REPLICA_SILENCE = gauge(
    "quire_replica_silence_seconds",
    "Time since the replica's latest message, while one is due: each second, of a replica with work.",
    unit="s",
    labels=OF_REPLICA,
)
REPLICA_UPTIME = _gauge(
    "uptime_s", "quire_replica_uptime_seconds", "Time since the replica's scheduler started.", unit="s"
)
STEPS = _counter("num_steps", "quire_steps", "Steps that the scheduler planned.")
STEP_SECONDS = _counter(
    "busy_s",
    "quire_step_seconds",
    "Time in which at least one step was computed; its rate is the share of time that the replica is busy.",
    unit="s",
)
COMPUTED_TOKENS = _counter(
    "num_computed_tokens",
    "quire_computed_tokens",
    "Tokens that steps computed: of prompts, sampled, and computed again after preemptions and moves.",
)
PLAN_WAITS = _counter(
    "num_plan_waits", "quire_plan_waits", "Steps that followed another one without idle time between."
)
PLAN_WAIT_SECONDS = _counter(
    "plan_wait_s",
    "quire_plan_wait_seconds",
    "Time that rank 0 waited for the plans of these steps: the scheduler's cost.",
    unit="s",
)
COMPILATIONS = _counter(
    "num_compilations",
    "quire_kernel_compilations",
    "Kernel variants compiled since the replica was ready, each of which delays a step; 0 is expected.",
)
KV_BLOCKS = gauge(
    "quire_kv_blocks",
    "KV blocks by state: active (held by sequences), fenced (freed, a step may still read them), cached "
    "(free, with content of the prefix cache) and empty.",
    labels=(*OF_REPLICA, "state"),
)
STATE_SLOTS = gauge(
    "quire_state_slots",
    "Slots for states, in models whose layers keep one of each sequence, by state: active (of sequences), "
    "snapshot (of cached prefixes) and other (fenced or empty); host_snapshot (of prefixes, in host memory).",
    labels=(*OF_REPLICA, "state"),
)
ENCODER_BYTES = gauge(
    "quire_encoder_cache_bytes",
    "Encoder outputs of images on each rank, of models that read images: held, and the room for more.",
    unit="bytes",
    labels=(*OF_REPLICA, "state"),
)
ENCODER_OUTPUTS = _number(
    gauge,
    "num_encoder_outputs",
    "quire_encoder_outputs",
    "Images whose encoder outputs are held.",
    table=OF_IMAGES,
)
ENCODED_IMAGES = _number(
    counter,
    "num_encoded_images",
    "quire_encoded_images",
    "Images that were encoded; one whose output was evicted counts again.",
    table=OF_IMAGES,
)
IMAGE_TENSOR_BYTES = _number(
    gauge,
    "image_tensor_bytes",
    "quire_image_tensor_bytes",
    "Tensors of images that the scheduler holds or awaits.",
    unit="bytes",
    table=OF_IMAGES,
)
KV_LEASES = _moved(
    gauge,
    "num_kv_leases",
    "quire_kv_leases",
    "Sequences that left, whose blocks are held for other replicas.",
)
KV_OFFERS = _moved(
    counter, "num_kv_offers", "quire_kv_offers", "Sequences that left with a lease of their blocks."
)
KV_PULLS = _moved(
    counter, "num_kv_pulls", "quire_kv_pulls", "Sequences that came with blocks of another replica."
)
KV_PULLED_TOKENS = _moved(
    counter,
    "num_kv_pulled_tokens",
    "quire_kv_pulled_tokens",
    "Tokens whose KV was read from another replica.",
)
KV_PULLED_BYTES = _moved(
    counter,
    "num_kv_pulled_bytes",
    "quire_kv_pulled_bytes",
    "Bytes of KV read from other replicas by the rank that read most.",
    "bytes",
)
KV_RECOMPUTED_TOKENS = _moved(
    counter,
    "num_kv_recomputed_tokens",
    "quire_kv_recomputed_tokens",
    "Tokens that were computed although another replica had lent their blocks.",
)
SPLIT_PROMPTS = _moved(
    counter,
    "num_split_prompts",
    "quire_split_prompts",
    "Prompts computed for another replica, to which the sequence went with its first token.",
)
KV_AHEAD_TOKENS = _moved(
    counter,
    "num_kv_ahead_tokens",
    "quire_kv_ahead_tokens",
    "Tokens whose KV was read from another replica while that computed the rest of their prompt.",
)
KV_PULL_RATE = _moved(
    gauge,
    "kv_pull_bytes_per_s",
    "quire_kv_pull_rate",
    "Bytes per second at which a rank reads the blocks of another replica, as last measured.",
    "bytes",
)
KV_PULL_FAILURES = counter(
    "quire_kv_pull_failures",
    "Sequences whose blocks at another replica were computed instead, some or all, by reason.",
    labels=(*OF_REPLICA, "reason"),
)
KV_TOKENS = _gauge(
    "num_used_tokens",
    "quire_kv_tokens",
    "Tokens whose KV running sequences hold; a shared block counts for each.",
)
KV_FRAGMENTATION = _gauge(
    "mean_kv_fragmentation",
    "quire_kv_fragmentation",
    "Share of the allocated KV slots that held no token, mean over all steps.",
    unit="percentunit",
)
HOST_BLOCKS = gauge(
    "quire_host_kv_blocks",
    "KV blocks of host memory by state: active (of preempted sequences), cached and empty.",
    labels=(*OF_REPLICA, "state"),
)
SWAPPED_BLOCKS = _counter(
    "num_swapped_blocks",
    "quire_swapped_kv_blocks",
    "KV blocks copied between device and host memory, in both directions.",
)
STORED_BLOCKS = gauge(
    "quire_stored_kv_blocks",
    "KV blocks in the files of --kv-disk and --kv-shared that all ranks of the replica have, by tier: disk, shared.",
    labels=(*OF_REPLICA, "tier"),
)
STORED_BYTES = gauge(
    "quire_stored_kv_bytes",
    "Bytes of the files in these directories, of all servers, as last counted at a write, by tier: disk, shared.",
    labels=(*OF_REPLICA, "tier"),
    unit="bytes",
)
STORED_READS = _counter(
    "num_read_blocks", "quire_stored_kv_reads", "KV blocks read from files, each on all ranks of the replica."
)
STORED_WRITES = _counter(
    "num_written_blocks",
    "quire_stored_kv_writes",
    "KV blocks written to files, each by all ranks of the replica.",
)
STORED_HITS = _counter(
    "stored_hit_tokens",
    "quire_stored_kv_hit_tokens",
    "Prompt tokens that requests began with whose KV was read from files for them.",
)
STORED_CORRUPT = _counter(
    "num_corrupt_blocks",
    "quire_stored_kv_corrupt",
    "KV blocks in files whose content was not what their names say; they were computed.",
)
STORED_FAILED = _counter(
    "num_failed_reads",
    "quire_stored_kv_failed_reads",
    "KV blocks that a read from files did not find or verify.",
)
STORED_LATE = _counter(
    "num_late_reads", "quire_stored_kv_late_reads", "Requests that waited for a read from files no longer."
)
KEPT_TOKENS = _counter(
    "num_retained_tokens",
    "quire_recovery_kept_tokens",
    "Tokens whose keys and values survived failures of the ranks, so that they were not computed again.",
)
QUEUED_TOKENS = _gauge(
    "queued_tokens",
    "quire_queued_tokens",
    "Prompt tokens that are not planned yet, of waiting and of running sequences.",
)
OLDEST_WAIT = _gauge(
    "oldest_wait_s",
    "quire_oldest_wait_seconds",
    "Longest time that a sequence has waited for its first row.",
    unit="s",
)
RANK_INFO = gauge(
    "quire_rank_info",
    "Always 1; the labels say where a rank runs.",
    labels=(*OF_REPLICA, "rank", "node", "device"),
)
RANK_MEMORY = gauge(
    "quire_rank_resident_memory_bytes",
    "Resident memory of a rank's process, if it runs on the gateway's machine.",
    unit="bytes",
    labels=(*OF_REPLICA, "rank"),
)
RANK_CPU = counter(
    "quire_rank_cpu_seconds",
    "CPU time of a rank's process, if it runs on the gateway's machine.",
    unit="s",
    labels=(*OF_REPLICA, "rank"),
)
