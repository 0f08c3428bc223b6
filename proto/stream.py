"""What gateways and a replica's scheduler say to each other: msgpack frames over a ZeroMQ DEALER and ROUTER.

A gateway numbers its sequences by *handles*; the scheduler answers with one TokenBatch a step and gateway, never
one message a request.

    gateway -> scheduler    Submit, Abort, Stop, StatusQuery, CacheQuery, Drain
    scheduler -> gateway    TokenBatch, ReplicaStatus, CacheReport
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any

import msgpack

from .block_tables import IntArray
from .errors import InvalidRequest, ProtocolError
from .sampling import SamplingParams
from .step import NO_INTS, Logprobs, PromptLogprobs, ints, pack_ints, values_of

VERSION = 2
# Of a block's digest in a CacheReport: enough to choose a replica by, and never to share a block by.
CACHE_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Submit:
    """A sequence to run.

    Attributes:
        handle: the gateway's own number for it, unique among its running ones.
        request_id: the client's name for it, for logs and errors.
        sampling: checked already; its seed is set, so that the sequence can be run again anywhere.
            Stop strings are the gateway's to find. With ``n`` answers, answer i has the handle ``handle + i``.
        tenant: whose request it is, for the fair policy.
        priority: higher goes first; the same in the order of arrival.
        timeout_s: time left to its deadline; None: none.
        salt: prefixes are shared only between equal salts.
        generated_token_ids: what the sequence has generated elsewhere already. Its answer goes on after them as it
            would have gone on there, and limits, seeds and the account count from its beginning; only new tokens are
            told. One answer then: answer i of n is submitted alone, with ``seed`` + i.
    """

    handle: int
    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""
    generated_token_ids: IntArray = field(default_factory=lambda: NO_INTS)


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a sequence and frees its blocks; nothing more is said of it. Unknown handles are ignored."""

    handle: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a sequence whose gateway found a stop string: an Abort that is answered with the sequence's Finish."""

    handle: int


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Asks for a ReplicaStatus."""

    query_id: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Asks the replica to get empty. From now on it takes no request: what comes or waits is MOVED.

    Attributes:
        grace_s: how long running sequences may still take; what is left then is MOVED. A later Drain can only
            shorten it.
    """

    grace_s: float


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Asks for a CacheReport.

    Attributes:
        since: the version of the last one that came from this replica; 0: none has.
    """

    since: int


class FinishReason(StrEnum):
    """Why a sequence ended. MOVED is no end: the replica gives it back, to be run elsewhere from where it is."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went, in seconds; see Timings in inference.proto."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    recomputed_tokens: int = 0
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence.

    Attributes:
        stop_token_id: the request's own stop token that ended it; None for the model's end of sequence.
        num_completion_tokens: sampled tokens, the one that stopped it included.
        score: beam search: the summed log-probability, length penalty applied; else None.
        grpc_status: with reason ERROR, the status of the error (`errors.from_status` makes it again).
    """

    handle: int
    reason: FinishReason
    stop_token_id: int | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    score: float | None = None
    grpc_status: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One step's news for one gateway.

    Attributes:
        step_id: the step that sampled them; 0 for news outside a step.
        handles: [n] int32, whose token each is; a handle may repeat, its tokens in order.
        token_ids: [n] int32.
        finished: sequences that ended, after their tokens above.
        prompt_logprobs: of tokens of prompts, by handle, in a batch without anything else; they come in order, and
            after a move perhaps again.
    """

    step_id: int
    handles: IntArray = field(default_factory=lambda: NO_INTS)
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: Logprobs | None = None
    finished: tuple[Finish, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Which prefixes a replica holds, or how that has changed. Hashes stand one after the other.

    Attributes:
        version: of this state; later reports may be asked for from here on.
        since: the version that `added` and `removed` change. 0: `added` is all there is (of a very large cache the
            newest), and what was known before is void.
        added, removed: CACHE_HASH_BYTES each; see `prefix_cache.prefix_hashes` for what is hashed.
    """

    version: int
    since: int
    added: bytes
    removed: bytes


@dataclass(frozen=True, slots=True)
class RankStatus:
    rank: int
    pid: int
    node: str
    device: str
    stage: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's state in numbers; the fields mean what admin.proto says of them.

    Attributes:
        draining: it takes no new requests.
        queued_tokens: prompt tokens not planned yet, of waiting and of running sequences.
        kv_use: share of its blocks that running sequences hold.
        oldest_wait_s: how long the one has waited that waits longest for its first row.
        tokens_per_s: computed, prompt and sampled ones together, a second in which it computed at all; recent seconds
            count most. 0: nothing was computed yet.
        cache_version: of its prefix cache, as in CacheReport.
        mean_plan_wait_s: how long its ranks waited for a plan when the step before was done; idle times left out.
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


GatewayMessage = Submit | Abort | Stop | StatusQuery | CacheQuery | Drain
ReplicaMessage = TokenBatch | ReplicaStatus | CacheReport


def encode(message: GatewayMessage | ReplicaMessage) -> bytes:
    """The message as a frame: a version byte, then a msgpack array of a tag and positional fields."""
    packed: bytes = msgpack.packb(_ENCODERS[type(message)](message))
    return bytes((VERSION,)) + packed


def decode(frame: bytes) -> GatewayMessage | ReplicaMessage:
    """Raises ProtocolError on an unknown version, tag or shape."""
    if not frame or frame[0] != VERSION:
        raise ProtocolError(
            f"stream message of version {frame[0] if frame else 'none'}; this side speaks {VERSION}"
        )
    try:
        tag, *values = msgpack.unpackb(memoryview(frame)[1:])
        return _DECODERS[tag](values)
    except (ValueError, TypeError, IndexError, KeyError, InvalidRequest) as error:
        raise ProtocolError(f"stream message cannot be read: {error}") from error


def _encode_submit(message: Submit) -> tuple[Any, ...]:
    prompt, generated = pack_ints(message.prompt_token_ids), pack_ints(message.generated_token_ids)
    standing = message.tenant, message.priority, message.timeout_s, message.salt
    return (
        "submit",
        message.handle,
        message.request_id,
        prompt,
        generated,
        values_of(message.sampling),
        *standing,
    )


def _decode_submit(values: list[Any]) -> Submit:
    handle, request_id, prompt, generated, sampling, tenant, priority, timeout_s, salt = values
    standing = tenant, priority, timeout_s, salt
    return Submit(handle, request_id, ints(prompt), SamplingParams(*sampling), *standing, ints(generated))


def _encode_batch(message: TokenBatch) -> tuple[Any, ...]:
    logprobs = None if message.logprobs is None else message.logprobs.pack()
    arrays = pack_ints(message.handles), pack_ints(message.token_ids)
    finished = [astuple(finish) for finish in message.finished]
    of_prompts = None if message.prompt_logprobs is None else message.prompt_logprobs.pack()
    return "tokens", message.step_id, *arrays, logprobs, finished, of_prompts


def _decode_batch(values: list[Any]) -> TokenBatch:
    step_id, handles, token_ids, logprobs, finished, of_prompts = values
    unpacked = None if logprobs is None else Logprobs.unpack(logprobs)
    scored = None if of_prompts is None else PromptLogprobs.unpack(of_prompts)
    ends = tuple(map(_decode_finish, finished))
    return TokenBatch(step_id, ints(handles), ints(token_ids), unpacked, ends, scored)


def _decode_finish(values: list[Any]) -> Finish:
    handle, reason, stop_token_id, prompt, completion, cached, timings, *error = values
    usage = prompt, completion, cached
    return Finish(handle, FinishReason(reason), stop_token_id, *usage, Timings(*timings), *error)


def _decode_status(values: list[Any]) -> ReplicaStatus:
    query_id, replica_id, model, problem, ranks, *numbers = values
    rank_statuses = tuple(RankStatus(*rank) for rank in ranks)
    return ReplicaStatus(query_id, replica_id, model, problem, rank_statuses, *numbers)


_ENCODERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Submit: _encode_submit,
    Abort: lambda message: ("abort", message.handle),
    Stop: lambda message: ("stop", message.handle),
    StatusQuery: lambda message: ("status?", message.query_id),
    CacheQuery: lambda message: ("cache?", message.since),
    Drain: lambda message: ("drain", message.grace_s),
    TokenBatch: _encode_batch,
    ReplicaStatus: lambda message: ("status", *astuple(message)),
    CacheReport: lambda message: ("cache", *astuple(message)),
}
_DECODERS: dict[str, Callable[[list[Any]], GatewayMessage | ReplicaMessage]] = {
    "submit": _decode_submit,
    "abort": lambda values: Abort(*values),
    "stop": lambda values: Stop(*values),
    "status?": lambda values: StatusQuery(*values),
    "cache?": lambda values: CacheQuery(*values),
    "drain": lambda values: Drain(*values),
    "tokens": _decode_batch,
    "status": _decode_status,
    "cache": lambda values: CacheReport(*values),
}
