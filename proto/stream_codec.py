"""Frames of the messages between gateways and a replica's scheduler: msgpack of a tag and positional fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Any, TypeVar

from .block_map import BlockMap, MappedSequence
from .codec import FrameCodec, field_values, pack_ints, unpack_ints
from .engine_command import EngineCommand
from .errors import ProtocolError
from .lora import LoraReference
from .pooling import Pooled, PoolingParams
from .replica_status import Activity, RankStatus, ReplicaStatus
from .sampling import SamplingParams
from .step import Logprobs, PromptLogprobs
from .stream import (
    VERSION,
    Abort,
    BlockMapQuery,
    CacheQuery,
    CacheReport,
    ControlEngine,
    Drain,
    EngineControlled,
    Finish,
    FinishReason,
    FlushCache,
    GatewayMessage,
    LoadLora,
    LoraLoaded,
    Recall,
    Recalled,
    RecalledOutput,
    ReplicaMessage,
    StatusQuery,
    Stop,
    Submit,
    Timings,
    TokenBatch,
)
from .structured_outputs import OutputConstraint

_codec = FrameCodec("stream", VERSION)
Known = TypeVar("Known")
# Fields of SamplingParams that every sender of this VERSION sends; those after them only if they are set.
_NUM_SAMPLING_FIELDS = 27


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
    return _known(
        Finish, [handle, FinishReason(reason), stop_token_id, *usage, _known(Timings, timings), *error]
    )


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
    ControlEngine: lambda message: ("control", message.query_id, message.command.pack()),
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
