"""What gateways and a replica's scheduler say to each other: msgpack frames over a ZeroMQ DEALER and ROUTER.

A gateway numbers its sequences by *handles*; the scheduler answers with one TokenBatch a step and gateway, never
one message a request.

    gateway -> scheduler    Submit, Abort, Stop, StatusQuery
    scheduler -> gateway    TokenBatch, ReplicaStatus
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
from .step import NO_INTS, Logprobs, ints, pack_ints

VERSION = 1


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
    """

    handle: int
    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""


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


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went, in seconds; see Timings in inference.proto."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    recomputed_tokens: int = 0


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
    """

    step_id: int
    handles: IntArray = field(default_factory=lambda: NO_INTS)
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: Logprobs | None = None
    finished: tuple[Finish, ...] = ()


@dataclass(frozen=True, slots=True)
class RankStatus:
    rank: int
    pid: int
    node: str
    device: str
    stage: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's state in numbers; the fields mean what admin.proto says of them."""

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
    mean_waste: float
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


GatewayMessage = Submit | Abort | Stop | StatusQuery
ReplicaMessage = TokenBatch | ReplicaStatus


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
    prompt = pack_ints(message.prompt_token_ids)
    standing = message.tenant, message.priority, message.timeout_s, message.salt
    return "submit", message.handle, message.request_id, prompt, astuple(message.sampling), *standing


def _decode_submit(values: list[Any]) -> Submit:
    handle, request_id, prompt, sampling, *standing = values
    return Submit(handle, request_id, ints(prompt), SamplingParams(*sampling), *standing)


def _encode_batch(message: TokenBatch) -> tuple[Any, ...]:
    logprobs = None if message.logprobs is None else message.logprobs.pack()
    arrays = pack_ints(message.handles), pack_ints(message.token_ids)
    return "tokens", message.step_id, *arrays, logprobs, [astuple(finish) for finish in message.finished]


def _decode_batch(values: list[Any]) -> TokenBatch:
    step_id, handles, token_ids, logprobs, finished = values
    unpacked = None if logprobs is None else Logprobs.unpack(logprobs)
    return TokenBatch(step_id, ints(handles), ints(token_ids), unpacked, tuple(map(_decode_finish, finished)))


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
    TokenBatch: _encode_batch,
    ReplicaStatus: lambda message: ("status", *astuple(message)),
}
_DECODERS: dict[str, Callable[[list[Any]], GatewayMessage | ReplicaMessage]] = {
    "submit": _decode_submit,
    "abort": lambda values: Abort(*values),
    "stop": lambda values: Stop(*values),
    "status?": lambda values: StatusQuery(*values),
    "tokens": _decode_batch,
    "status": _decode_status,
}
