"""ReplicaStatus: a replica's state in numbers, which it sends its gateways once per second while it changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from .later_fields import sent_if_set
from .lora import LoraReference

# Stage of a rank that compiles a kernel variant: its step takes longer than steps before it.
COMPILE_STAGE = "compile"


class Activity(StrEnum):
    """Activity of a replica.

    IDLE: no step is computed. BUSY: steps are computed in the expected time. PREFILL: as BUSY, with a step that is
    expected to take long. LATE: the present step takes several times longer than expected, and its ranks are
    examined. RECOVERING: a rank failed, and the worker group is rebuilt.
    """

    IDLE = "idle"
    BUSY = "busy"
    PREFILL = "prefill"
    LATE = "late"
    RECOVERING = "recovering"


class ReplicaRole(StrEnum):
    """Part of a request that a replica computes.

    BOTH: all of it. PREFILL: long prompts up to the first token, which a DECODE replica continues from their KV.
    DECODE: everything else. Each can compute whole requests, and does when no other replica can.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank's process and the stage it is in.

    Attributes:
        times: of its recent steps, in words: what it computes, and each kind of collective and transfer; and that it
            is slow, if it is. Empty for a single rank.
    """

    rank: int
    pid: int
    node: str
    device: str
    stage: str
    times: str = sent_if_set("")


@dataclass(frozen=True)
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
        num_fenced_blocks: freed blocks that a step in flight may still read.
        fullest_kv_use: share of the blocks that sequences hold, of the fullest partition: with data-parallel
            attention, the KV blocks of one rank.
        num_state_slots: slots for the states of models whose layers keep one of each sequence; 0 for others.
        num_used_state_slots: those of sequences.
        num_snapshots: those with the state after a cached prefix, which a later sequence may start from.
        num_saved_snapshots: snapshots taken so far by copying a state.
        num_host_state_slots, num_host_snapshots: slots in host memory, and the snapshots there.
        num_kv_leases: sequences that left, whose blocks are held until another replica has read them.
        num_kv_offers: leases so far.
        num_kv_pulls, num_kv_pulled_tokens, num_kv_pulled_bytes: sequences that brought blocks from another replica,
            their tokens, and the bytes of the rank that read most.
        num_kv_failures: sequences whose blocks were computed instead, by reason, in the order of KvFailure.
        num_disk_blocks, num_shared_blocks: blocks in the files of --kv-disk and --kv-shared that all ranks have.
        disk_bytes, shared_bytes: of all files in these directories, as last counted at a write.
        num_read_blocks, num_written_blocks: blocks read from and written to files so far.
        num_corrupt_blocks: blocks in files whose content was not what their names say; they were computed.
        num_failed_reads, num_late_reads: blocks that a read did not find, and requests that waited for one no longer.
        stored_hit_tokens: prompt tokens that requests began with and that were read from files for them.
        read_blocks_per_s: measured rate of such reads, of the slowest rank; 0 before the first.
        num_kv_recomputed_tokens: tokens that were computed although another replica had lent their blocks.
        kv_pull_bytes_per_s: recent rate at which a rank reads from another replica; 0 without KV transfers.
        kv_token_bytes: bytes that a rank reads for a token.
        num_kv_ahead_tokens: of the pulled tokens, those that came while the rest of their prompt was computed.
        num_split_prompts: prompts computed for another replica, to which the sequence went with its first token.
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
    num_fenced_blocks: int = 0
    fullest_kv_use: float = 0.0
    num_state_slots: int = 0
    num_used_state_slots: int = 0
    num_snapshots: int = 0
    num_saved_snapshots: int = 0
    num_kv_leases: int = 0
    num_kv_offers: int = 0
    num_kv_pulls: int = 0
    num_kv_pulled_tokens: int = 0
    num_kv_pulled_bytes: int = 0
    num_kv_failures: tuple[int, ...] = ()
    num_disk_blocks: int = 0
    num_shared_blocks: int = 0
    disk_bytes: int = 0
    shared_bytes: int = 0
    num_read_blocks: int = 0
    num_written_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_failed_reads: int = 0
    num_late_reads: int = 0
    stored_hit_tokens: int = 0
    read_blocks_per_s: float = 0.0
    num_kv_recomputed_tokens: int = 0
    kv_pull_bytes_per_s: float = 0.0
    kv_token_bytes: float = 0.0
    num_host_state_slots: int = 0
    num_host_snapshots: int = 0
    num_kv_ahead_tokens: int = 0
    num_split_prompts: int = 0

    @property
    def stores_blocks(self) -> bool:
        """Return whether blocks are, or were, in files."""
        return bool(self.num_disk_blocks or self.num_shared_blocks or self.num_written_blocks)

    @property
    def is_uneven(self) -> bool:
        """Return whether a partition is fuller than all blocks together; only with data-parallel attention."""
        return bool(self.num_blocks) and self.fullest_kv_use > self.num_used_blocks / self.num_blocks + 0.005

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found; 0 if none was looked up."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


@dataclass(frozen=True)
class QueueInfo:
    """Sequences of a replica. `num_finished` and `num_preemptions` are totals since its start."""

    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaFigures:
    """Figures of a replica, as it sends them to its gateways and as they report them.

    Attributes:
        problem: why the replica gets no requests, or why it drains; empty otherwise.
        num_computed_tokens, busy_s: tokens that its steps computed, and the time in which at least one step was
            computed.
        mean_plan_wait_s: mean time that its ranks wait for the next plan after a step; idle time is excluded.
        queued_tokens: prompt tokens that are not planned yet, of waiting and running sequences.
        oldest_wait_s: longest time that a sequence has waited for its first row.
        tokens_per_s: prompt and sampled tokens per busy second, recent seconds weighted most; 0 before the first.
        num_compilations: kernel variants that rank 0 has compiled since it was ready, each of which delayed a step;
            0 is expected.
        activity_s: how long the replica has done what it does.
        num_recoveries: times that its ranks were rebuilt after a failure.
        weights_version: name of its weights; empty for those that it started with.
        sleep_level: level of the present sleep; 0 while it is awake.
        prefill_tokens_per_s: prompt tokens computed per second in steps full of them; 0 until measured.
    """

    replica_id: str = field(kw_only=False)
    model: str = field(kw_only=False)
    problem: str = ""
    ranks: tuple[RankStatus, ...] = ()
    num_steps: int = 0
    uptime_s: float = 0.0
    mean_plan_wait_s: float = 0.0
    num_computed_tokens: int = 0
    busy_s: float = 0.0
    queued_tokens: int = 0
    oldest_wait_s: float = 0.0
    tokens_per_s: float = 0.0
    num_compilations: int = 0
    activity_s: float = 0.0
    num_recoveries: int = 0
    weights_version: str = ""
    sleep_level: int = 0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus(KvCacheInfo, QueueInfo, ReplicaFigures):
    """A replica's state in numbers: its figures, its queue and its KV cache, and what only its gateways need.

    Attributes:
        draining: the replica takes no new requests.
        kv_use: share of the blocks that running sequences hold.
        cache_version: version of the prefix cache, as in CacheReport.
        num_plan_waits, plan_wait_s: steps that followed another one without idle time between, and how long rank 0
            waited for their plans.
        max_num_seqs: sequences that may run at once.
        num_drafts, num_draft_tokens: verified drafts, and their tokens: of speculative decoding, and of text that
            grammars force.
        num_accepted_tokens: drafts of which the first, the second, ... token was accepted.
        activity: what the replica does.
        generates: the model generates text; False if it only pools prompts.
        loras: the replica's registry of adapters.
        weights_path, weights_timestamp: those of the latest UPDATE_WEIGHTS; empty before the first.
        is_paused: no step is planned until an operator resumes the replica.
        num_retained_tokens: computed tokens of sequences whose KV survived failures of the ranks.
        last_step_s: time since the latest step whose result came through all ranks; infinite before the first.
        reports_changes: a StatusQuery's `watch_s` has an effect.
        num_report_rounds: rounds, one per second, in which all gateways that watch are told of a change.
        kv_layout: fingerprint of the layout of its blocks, which replicas with the same one may take from each other;
            empty if it neither takes nor gives any.
        kv_state_bytes: bytes that a rank reads for a sequence's state; 0 for a model without states.
        role: part of a request that the replica computes.
        prefill_delay: share of the time of a prompt by which its steps are longer than the steps without it: so much
            each running sequence is delayed. 1 until it is measured.
        encoder_cache_bytes: of the encoder outputs that a rank may hold; 0 for a model that reads text alone.
        encoder_output_bytes, num_encoder_outputs: outputs that each rank holds.
        num_encoded_images: images encoded so far; one whose output was evicted counts again.
        image_tensor_bytes: of the tensors of images that the scheduler holds or awaits.
    """

    # A later field is added at the end.
    SENT_ORDER: ClassVar = (
        "query_id", "replica_id", "model", "problem", "ranks", "block_size", "num_blocks",
        "num_used_blocks", "num_cached_blocks", "peak_used_blocks", "num_used_tokens",
        "mean_kv_fragmentation", "prefix_query_tokens", "prefix_hit_tokens", "num_host_blocks",
        "num_used_host_blocks", "num_cached_host_blocks", "num_swapped_blocks", "num_waiting",
        "num_running", "num_finished", "num_preemptions", "num_steps", "uptime_s", "draining",
        "queued_tokens", "kv_use", "oldest_wait_s", "tokens_per_s", "cache_version", "mean_plan_wait_s",
        "num_fenced_blocks", "num_computed_tokens", "busy_s", "num_plan_waits", "plan_wait_s",
        "max_num_seqs", "num_compilations", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
        "activity", "activity_s", "num_recoveries", "generates", "loras", "weights_version", "weights_path",
        "weights_timestamp", "is_paused", "sleep_level", "num_retained_tokens", "fullest_kv_use", "last_step_s",
        "reports_changes", "num_state_slots", "num_used_state_slots", "num_snapshots", "num_saved_snapshots",
        "kv_layout", "num_kv_leases", "num_kv_offers", "num_kv_pulls", "num_kv_pulled_tokens", "num_kv_pulled_bytes",
        "num_kv_failures",
        "num_disk_blocks", "num_shared_blocks", "disk_bytes", "shared_bytes", "num_read_blocks",
        "num_written_blocks", "num_corrupt_blocks", "num_failed_reads", "num_late_reads", "stored_hit_tokens",
        "read_blocks_per_s", "role", "prefill_tokens_per_s", "num_kv_recomputed_tokens", "kv_pull_bytes_per_s",
        "kv_token_bytes", "prefill_delay",
        "encoder_cache_bytes", "encoder_output_bytes", "num_encoder_outputs", "num_encoded_images",
        "image_tensor_bytes",
        "num_host_state_slots", "num_host_snapshots",
        "num_kv_ahead_tokens", "num_split_prompts",
        "num_report_rounds", "kv_state_bytes",
    )  # fmt: skip

    query_id: int
    draining: bool = False
    kv_use: float = 0.0
    cache_version: int = 0
    num_plan_waits: int = 0
    plan_wait_s: float = 0.0
    max_num_seqs: int = 64
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: tuple[int, ...] = ()
    activity: Activity = Activity.IDLE
    generates: bool = True
    loras: tuple[LoraReference, ...] = ()
    weights_path: str = ""
    weights_timestamp: str = ""
    is_paused: bool = False
    num_retained_tokens: int = 0
    last_step_s: float = math.inf
    reports_changes: bool = False
    num_report_rounds: int = 1
    kv_layout: bytes = b""
    kv_state_bytes: int = 0
    role: ReplicaRole = ReplicaRole.BOTH
    prefill_delay: float = 1.0
    encoder_cache_bytes: int = 0
    encoder_output_bytes: int = 0
    num_encoder_outputs: int = 0
    num_encoded_images: int = 0
    image_tensor_bytes: int = 0

    @property
    def fullest_use(self) -> float:
        """Share of its blocks that sequences hold, of the fullest partition. Earlier releases send 0 for it."""
        return max(self.kv_use, self.fullest_kv_use)
