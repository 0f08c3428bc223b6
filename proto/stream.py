"""Messages between gateways and a replica's scheduler: msgpack frames over a ZeroMQ DEALER and ROUTER.

A gateway numbers its sequences with *handles*. The scheduler sends one TokenBatch per step and gateway, never one
message per request.

    gateway -> scheduler    Submit, Abort, Stop, StatusQuery, CacheQuery, BlockMapQuery, Drain, FlushCache, LoadLora,
                            ControlEngine, Recall
    scheduler -> gateway    TokenBatch, ReplicaStatus, CacheReport, BlockMap, LoraLoaded, EngineControlled, Recalled

Gateways and replicas of neighboring releases work together. A field may be added at the end of a message, with a
default for senders that do not know it. Receivers ignore later fields, except those of a Submit: what a request asks
for is either done or refused, so a later field is sent only if it is set, and a replica that does not know it refuses
the request. Every other change needs a new VERSION.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any, TypeVar

from .block_tables import IntArray
from .codec import FrameCodec, field_values, pack_ints, unpack_ints
from .engine_command import EngineCommand
from .errors import ProtocolError, QuireError, from_reason
from .lora import LoraReference
from .pooling import Pooled, PoolingParams
from .refusal import RefusalScope
from .sampling import SamplingParams
from .step import NO_INTS, Logprobs, PromptLogprobs
from .structured_outputs import OutputConstraint

VERSION = 4
# Bytes of a block's digest in a CacheReport: enough to route by, too few to share a block by.
CACHE_HASH_BYTES = 8
# Bounds of a BlockMap.
MAX_MAP_CELLS = 8192
MAX_MAP_SEQUENCES = 256

_codec = FrameCodec("stream", VERSION)
Known = TypeVar("Known")
# Fields of SamplingParams that every sender of this VERSION sends; those after them only if they are set.
_NUM_SAMPLING_FIELDS = 27


@dataclass(frozen=True, slots=True)
class Submit:
    """A sequence to run.

    Attributes:
        handle: the gateway's number for the sequence, unique among its running sequences.
        request_id: the client's name for the request, for logs and errors.
        sampling: validated by the gateway, with its seed set, so that any replica can run the sequence again.
            The gateway itself matches stop strings. With ``n`` outputs, output i has the handle ``handle + i``.
        tenant: the request's tenant, for the fair policy.
        priority: higher runs first; equal priorities run in order of arrival.
        timeout_s: seconds left to the deadline; None for no deadline.
        salt: prefixes are shared only between equal salts.
        prefix_pool: prefixes are shared with the other tenants of this pool; empty for the tenant's own alone.
        generated_token_ids: tokens that the sequence has generated on another replica. The output continues after
            them exactly as it would have there: limits, seeds and usage count from the sequence's start, and only
            new tokens are sent. Then the message holds one output: output i of n is submitted alone, with
            ``seed`` + i.
        constraint: the compiled form of the sampling's constraints; None if the output may have any form.
        lora: the adapter; None for the model alone.
        pooling: the prompt's pooled vector is wanted instead of an output; None to generate.
    """

    handle: int
    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""
    prefix_pool: str = ""
    generated_token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    constraint: OutputConstraint | None = None
    lora: LoraReference | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Aborts a sequence and frees its blocks; the scheduler sends no Finish. Unknown handles are ignored."""

    handle: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a sequence in which the gateway found a stop string. Unlike after an Abort, its Finish is sent."""

    handle: int


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Requests a ReplicaStatus."""

    query_id: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Drains the replica: new and waiting requests finish as MOVED from now on.

    Attributes:
        grace_s: seconds that running sequences may still take; the rest then finish as MOVED. A later Drain can
            only shorten the time.
    """

    grace_s: float


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Empties the prefix cache. Running sequences keep their blocks, which no later request finds."""


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Requests a CacheReport.

    Attributes:
        since: version of the last report received from this replica; 0 before the first.
    """

    since: int


@dataclass(frozen=True, slots=True)
class BlockMapQuery:
    """Requests a BlockMap."""

    query_id: int


@dataclass(frozen=True, slots=True)
class LoadLora:
    """Enters an adapter into the replica's registry, and has the ranks read it; a LoraLoaded answers.

    Of several entries of a name the one with the latest version counts. One without a path unloads the adapter once
    the sequences that use it have ended.

    Attributes:
        query_id: 0 if no answer is needed.
    """

    query_id: int
    reference: LoraReference


@dataclass(frozen=True, slots=True)
class LoraLoaded:
    """The outcome of a LoadLora.

    Attributes:
        error: why the adapter cannot be used; empty if it can.
    """

    query_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ControlEngine:
    """Orders a command; an EngineControlled answers when it is carried out, unless `query_id` is 0."""

    query_id: int
    command: EngineCommand


@dataclass(frozen=True, slots=True)
class EngineControlled:
    """The outcome of a ControlEngine.

    Attributes:
        error: why the command was not carried out; empty if it was.
    """

    query_id: int
    error: str = ""


class FinishReason(StrEnum):
    """Reason for a Finish. MOVED is not an end: the gateway continues the sequence on another replica."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ERROR = "error"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a sequence's life by stage; see Timings in inference.proto."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    recomputed_tokens: int = 0
    num_moves: int = 0
    num_recoveries: int = 0
    recovered_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence.

    Attributes:
        stop_token_id: the stop token of the request that ended the sequence; None for the model's end of sequence.
        num_completion_tokens: sampled tokens, the final stop token included.
        score: beam search: the summed log-probability with the length penalty applied; else None.
        grpc_status: with reason ERROR, the status of the error.
        error_reason: with reason ERROR, the error's own reason (`errors.from_reason` rebuilds the error).
        retry_after_s: with reason ERROR, the delay of the error, if it has one.
        weights_version: of the weights that sampled the last token; empty for those that the replica started with.
        scope: of a request that was refused when it came, the further requests that would be; None if unknown.
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
    error_reason: str = ""
    retry_after_s: float | None = None
    weights_version: str = ""
    scope: RefusalScope | None = None

    def to_error(self) -> QuireError:
        """Return the error of an end with reason ERROR."""
        return from_reason(self.error_reason, self.grpc_status, self.error, {}, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Recall:
    """Requests the tokens that a request has so far, of a gateway that may have died; a Recalled answers.

    Attributes:
        seed: of the request's first output.
        num_outputs: of the request.
        content: what else determines the tokens, see `retained_outputs.content_digest`.
    """

    query_id: int
    tenant: str
    request_id: str
    seed: int
    num_outputs: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RecalledOutput:
    """The tokens of an output so far.

    Attributes:
        index: of the output within its request.
        token_ids: [n] int32, the generated ones.
        finish: with reason MOVED if the output is not complete. Its handle means nothing.
    """

    index: int
    token_ids: IntArray
    finish: Finish


@dataclass(frozen=True, slots=True)
class Recalled:
    """The outputs that the replica knows of a request, running or ended; an output may be there twice."""

    query_id: int
    outputs: tuple[RecalledOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The updates of one step for one gateway.

    Attributes:
        step_id: the step that sampled the tokens; 0 for updates outside a step.
        handles: [n] int32, the sequence of each token; a handle may repeat, with its tokens in order.
        token_ids: [n] int32.
        finished: sequences that ended, after their tokens above.
        prompt_logprobs: of prompt tokens, by handle, in a batch of their own; sent in prompt order, and possibly
            a second time after a move.
        pooled: vectors by handle, in a batch with the ends of their sequences.
    """

    step_id: int
    handles: IntArray = field(default_factory=lambda: NO_INTS)
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: Logprobs | None = None
    finished: tuple[Finish, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Pooled | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cached prefixes of a replica, in full or as a diff.

    Attributes:
        version: of this state; a CacheQuery can ask for the changes since.
        since: the version to which `added` and `removed` apply. 0: `added` is the full state (of a very large
            cache, its newest part) and replaces every earlier one.
        added, removed: concatenated hashes of CACHE_HASH_BYTES each; see `prefix_cache.prefix_hashes`.
        window_blocks: last blocks of a prefix that must be cached for a hit; 0 for all blocks of the prefix.
    """

    version: int
    since: int
    added: bytes
    removed: bytes
    window_blocks: int = 0


class BlockState(IntEnum):
    """State of a KV block: EMPTY and CACHED blocks are free, SHARED blocks have more than one reference."""

    EMPTY = 0
    CACHED = 1
    FENCED = 2
    HELD = 3
    SHARED = 4


@dataclass(frozen=True, slots=True)
class MappedSequence:
    """A running sequence of a BlockMap.

    Attributes:
        num_tokens: tokens whose KV it has or is planned to have.
    """

    row: int
    request_id: str
    num_blocks: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The state of a replica's KV blocks. Cell i shows block 1 + i * stride.

    Attributes:
        num_blocks: all blocks, without the scratch block.
        stride: 1 up to MAX_MAP_CELLS blocks; the map of a larger pool shows every stride-th block.
        states: one BlockState per cell.
        rows: [cells] int32, the row that holds the block, one of them if several do; -1 if none does.
        sequences: the MAX_MAP_SEQUENCES running sequences with the most blocks.
    """

    query_id: int
    num_blocks: int
    stride: int
    states: bytes
    rows: IntArray
    sequences: tuple[MappedSequence, ...] = ()


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
        num_drafts, num_draft_tokens: verified drafts of speculative decoding, and their tokens.
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


GatewayMessage = (
    Submit
    | Abort
    | Stop
    | StatusQuery
    | CacheQuery
    | BlockMapQuery
    | Drain
    | FlushCache
    | LoadLora
    | ControlEngine
    | Recall
)
ReplicaMessage = (
    TokenBatch | ReplicaStatus | CacheReport | BlockMap | LoraLoaded | EngineControlled | Recalled
)


def encode(message: GatewayMessage | ReplicaMessage) -> bytes:
    """Return the message as a frame, whose array is a tag and positional fields."""
    return _codec.encode(_ENCODERS[type(message)](message))


def decode(frame: bytes) -> GatewayMessage | ReplicaMessage:
    """Return the message of a frame; raise ProtocolError if the version, the tag or the shape is unknown."""
    return _codec.decode(frame, _decode_tagged)


def refusal_of(frame: bytes) -> TokenBatch | None:
    """Return the answer to a Submit that `decode` refused, for its gateway not to wait; None for other frames."""
    try:
        return _codec.decode(frame, _refuse_submit)
    except ProtocolError:
        return None


def _decode_tagged(values: list[Any]) -> GatewayMessage | ReplicaMessage:
    tag, *rest = values
    return _DECODERS[tag](rest)


def _known(kind: type[Known], values: list[Any]) -> Known:
    """Return a dataclass of its fields in order, without the fields of a later release."""
    return kind(*values[: len(fields(kind))])  # type: ignore[arg-type]


def _encode_sampling(params: SamplingParams) -> tuple[Any, ...]:
    values = field_values(params)
    num_sent = len(values)
    while num_sent > _NUM_SAMPLING_FIELDS and values[num_sent - 1] == _UNSET_SAMPLING[num_sent - 1]:
        num_sent -= 1
    return values[:num_sent]


def _refuse_submit(values: list[Any]) -> TokenBatch:
    tag, handle, request_id, _, _, sampling, *_ = values
    if tag != "submit":
        raise ValueError(f"no answer is due to {tag!r}")
    problem = (
        f"request {request_id}: the replica runs an earlier release, which lacks what the request asks for"
    )
    num_sequences = SamplingParams(*sampling[:_NUM_SAMPLING_FIELDS]).num_sequences
    ends = (
        Finish(each, FinishReason.ERROR, grpc_status="UNAVAILABLE", error=problem)
        for each in range(handle, handle + num_sequences)
    )
    return TokenBatch(0, finished=tuple(ends))


def _encode_submit(message: Submit) -> tuple[Any, ...]:
    prompt, generated = pack_ints(message.prompt_token_ids), pack_ints(message.generated_token_ids)
    admission = message.tenant, message.priority, message.timeout_s, message.salt, message.prefix_pool
    set_only = [
        None if each is None else field_values(each)
        for each in (message.constraint, message.lora, message.pooling)
    ]
    while set_only and set_only[-1] is None:
        set_only.pop()
    return (
        "submit",
        message.handle,
        message.request_id,
        prompt,
        generated,
        _encode_sampling(message.sampling),
        *admission,
        *set_only,
    )


def _decode_submit(values: list[Any]) -> Submit:
    handle, request_id, prompt, generated, sampling, *others = values
    tenant, priority, timeout_s, salt, prefix_pool, *others = others
    others += [None] * (3 - len(others))  # sent only if they are set
    constraint, lora, pooling, *later = others
    if later:
        raise ValueError(f"a submit has {len(later)} fields of a later release")
    return Submit(
        handle,
        request_id,
        unpack_ints(prompt),
        SamplingParams(*sampling),
        tenant,
        priority,
        timeout_s,
        salt,
        prefix_pool,
        unpack_ints(generated),
        OutputConstraint.unpack(constraint),
        None if lora is None else _decode_reference(lora),
        PoolingParams.unpack(pooling),
    )


def _decode_reference(values: list[Any]) -> LoraReference:
    if not all(isinstance(value, str) for value in values):
        raise ValueError("an adapter's name, path and version are text")
    return _known(LoraReference, values)


def _encode_batch(message: TokenBatch) -> tuple[Any, ...]:
    logprobs = None if message.logprobs is None else message.logprobs.pack()
    arrays = pack_ints(message.handles), pack_ints(message.token_ids)
    finished = [astuple(finish) for finish in message.finished]
    of_prompts = None if message.prompt_logprobs is None else message.prompt_logprobs.pack()
    pooled = None if message.pooled is None else message.pooled.pack()
    return "tokens", message.step_id, *arrays, logprobs, finished, of_prompts, pooled


def _decode_batch(values: list[Any]) -> TokenBatch:
    step_id, handles, token_ids, logprobs, finished, of_prompts, *later = values
    unpacked = None if logprobs is None else Logprobs.unpack(logprobs)
    scored = None if of_prompts is None else PromptLogprobs.unpack(of_prompts)
    ends = tuple(map(_decode_finish, finished))
    pooled = Pooled.unpack(later[0]) if later else None
    return TokenBatch(step_id, unpack_ints(handles), unpack_ints(token_ids), unpacked, ends, scored, pooled)


def _command(values: list[Any]) -> EngineCommand:
    command = EngineCommand.unpack(values)
    if command is None:
        raise ValueError("a control has no command")
    return command


def _decode_finish(values: list[Any]) -> Finish:
    handle, reason, stop_token_id, prompt, completion, cached, timings, *error = values
    usage = prompt, completion, cached
    finish = _known(
        Finish, [handle, FinishReason(reason), stop_token_id, *usage, _known(Timings, timings), *error]
    )
    scope: Any = finish.scope
    return finish if scope is None else replace(finish, scope=_known(RefusalScope, scope))


def _decode_status(values: list[Any]) -> ReplicaStatus:
    query_id, replica_id, model, problem, ranks, *numbers = values
    rank_statuses = tuple(_known(RankStatus, rank) for rank in ranks)
    status = _known(ReplicaStatus, [query_id, replica_id, model, problem, rank_statuses, *numbers])
    loras: Any = status.loras
    return replace(
        status,
        num_accepted_tokens=tuple(status.num_accepted_tokens),
        loras=tuple(map(_decode_reference, loras)),
        activity=Activity(status.activity),
    )


def _encode_block_map(message: BlockMap) -> tuple[Any, ...]:
    sequences = [astuple(sequence) for sequence in message.sequences]
    cells = message.states, pack_ints(message.rows)
    return "blocks", message.query_id, message.num_blocks, message.stride, *cells, sequences


def _decode_block_map(values: list[Any]) -> BlockMap:
    query_id, num_blocks, stride, states, rows, sequences, *_ = values
    holders = tuple(_known(MappedSequence, each) for each in sequences)
    return BlockMap(query_id, num_blocks, stride, states, unpack_ints(rows), holders)


def _encode_recalled(message: Recalled) -> tuple[Any, ...]:
    outputs = [(each.index, pack_ints(each.token_ids), astuple(each.finish)) for each in message.outputs]
    return "recalled", message.query_id, outputs


def _decode_recalled(values: list[Any]) -> Recalled:
    query_id, outputs, *_ = values
    return Recalled(
        query_id,
        tuple(
            RecalledOutput(index, unpack_ints(token_ids), _decode_finish(finish))
            for index, token_ids, finish, *_ in outputs
        ),
    )


_UNSET_SAMPLING = field_values(SamplingParams())
_ENCODERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Submit: _encode_submit,
    Abort: lambda message: ("abort", message.handle),
    Stop: lambda message: ("stop", message.handle),
    StatusQuery: lambda message: ("status?", message.query_id),
    CacheQuery: lambda message: ("cache?", message.since),
    BlockMapQuery: lambda message: ("blocks?", message.query_id),
    Drain: lambda message: ("drain", message.grace_s),
    FlushCache: lambda message: ("flush",),
    LoadLora: lambda message: ("load lora", message.query_id, field_values(message.reference)),
    LoraLoaded: lambda message: ("lora", *astuple(message)),
    ControlEngine: lambda message: ("control", message.query_id, field_values(message.command)),
    EngineControlled: lambda message: ("controlled", *astuple(message)),
    Recall: lambda message: ("recall", *astuple(message)),
    Recalled: _encode_recalled,
    TokenBatch: _encode_batch,
    ReplicaStatus: lambda message: ("status", *astuple(message)),
    CacheReport: lambda message: ("cache", *astuple(message)),
    BlockMap: _encode_block_map,
}
_DECODERS: dict[str, Callable[[list[Any]], GatewayMessage | ReplicaMessage]] = {
    "submit": _decode_submit,
    "abort": partial(_known, Abort),
    "stop": partial(_known, Stop),
    "status?": partial(_known, StatusQuery),
    "cache?": partial(_known, CacheQuery),
    "blocks?": partial(_known, BlockMapQuery),
    "drain": partial(_known, Drain),
    "flush": partial(_known, FlushCache),
    "load lora": lambda values: LoadLora(values[0], _decode_reference(values[1])),
    "lora": partial(_known, LoraLoaded),
    "control": lambda values: ControlEngine(values[0], _command(values[1])),
    "controlled": partial(_known, EngineControlled),
    "recall": partial(_known, Recall),
    "recalled": _decode_recalled,
    "tokens": _decode_batch,
    "status": _decode_status,
    "cache": partial(_known, CacheReport),
    "blocks": _decode_block_map,
}
