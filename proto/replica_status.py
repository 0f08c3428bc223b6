"""ReplicaStatus: a replica's state in numbers, which its gateways ask for once per second."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .lora import LoraReference


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


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank's process and the stage it is in."""

    rank: int
    pid: int
    node: str
    device: str
    stage: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's state in numbers; admin.proto documents the fields that are not listed here.

    Attributes:
        draining: the replica takes no new requests.
        queued_tokens: prompt tokens not planned yet, of waiting and running sequences.
        kv_use: share of the blocks that running sequences hold.
        oldest_wait_s: longest time that a sequence without a row has waited for its first one.
        tokens_per_s: tokens computed (prompt and sampled) per busy second, recent seconds weighted most; 0 before
            the first token.
        cache_version: version of the prefix cache, as in CacheReport.
        mean_plan_wait_s: mean time that the ranks waited for a plan after finishing a step, idle times left out.
        num_fenced_blocks: freed blocks that a step in flight may still use.
        num_computed_tokens: tokens that steps computed since the start.
        busy_s: time since the start in which at least one step was computed.
        activity: what the replica does, and `activity_s`: for how long.
        num_recoveries: times that the worker group was rebuilt after a failure.
        num_plan_waits, plan_wait_s: steps that followed another one without idle time between, and how long rank 0
            waited for their plans.
        max_num_seqs: sequences that may run at once.
        num_compilations: kernel variants that rank 0 has compiled since it was ready; each delays a step.
        num_drafts, num_draft_tokens: verified drafts, and their tokens: of speculative decoding, and of text that
            grammars force.
        num_accepted_tokens: drafts of which the first, the second, ... token was accepted.
        generates: the model generates text; False if it only pools prompts.
        loras: the replica's registry of adapters.
        weights_version, weights_path, weights_stamp: of the latest UPDATE_WEIGHTS; empty before the first.
        is_paused: no step is planned until an operator resumes the replica.
        sleep_level: of the present sleep; 0 while it is awake.
        num_kept_tokens: computed tokens of sequences whose KV survived failures of the ranks.
        fullest_kv_use: share of its blocks that running sequences hold, of the fullest partition of the KV pool; 0
            from earlier releases.
    """

    query_id: int
    replica_id: str
    model: str
    problem: str
    ranks: tuple[RankStatus, ...]
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
    num_waiting: int
    num_running: int
    num_finished: int
    num_preemptions: int
    num_steps: int
    uptime_s: float
    draining: bool
    queued_tokens: int
    kv_use: float
    oldest_wait_s: float
    tokens_per_s: float
    cache_version: int
    mean_plan_wait_s: float = 0.0
    num_fenced_blocks: int = 0
    num_computed_tokens: int = 0
    busy_s: float = 0.0
    num_plan_waits: int = 0
    plan_wait_s: float = 0.0
    max_num_seqs: int = 64
    num_compilations: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: tuple[int, ...] = ()
    activity: Activity = Activity.IDLE
    activity_s: float = 0.0
    num_recoveries: int = 0
    generates: bool = True
    loras: tuple[LoraReference, ...] = ()
    weights_version: str = ""
    weights_path: str = ""
    weights_stamp: str = ""
    is_paused: bool = False
    sleep_level: int = 0
    num_kept_tokens: int = 0
    fullest_kv_use: float = 0.0
