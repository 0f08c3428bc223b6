"""Messages between gateways and a replica's scheduler, over a ZeroMQ DEALER and ROUTER, and their frames.

A gateway numbers its sequences with *handles*. The scheduler sends one TokenBatch per step and gateway, never one
message per request.

    gateway -> scheduler    Submit, Abort, Stop, StatusQuery, CacheQuery, BlockMapQuery, Drain, FlushCache, LoadLora,
                            ControlEngine, Recall, MediaUpload
    scheduler -> gateway    TokenBatch, ReplicaStatus, CacheReport, BlockMap, LoraLoaded, EngineControlled, Recalled,
                            MediaWanted

Gateways and replicas of neighboring releases work together. A field may be added at the end of a message, with a
default for senders that do not know it. Receivers ignore later fields, except those of a Submit: what a request asks
for is either done or refused, so a later field is sent only if it is set (`codec.sent_if_set`), and a replica that
does not know it refuses the request. Every other change needs a new VERSION.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .block_map import BlockMap
from .block_tables import IntArray
from .codec import NO_INTS, FrameCodec, num_always_sent
from .engine_command import EngineCommand
from .errors import ProtocolError, QuireError, from_reason
from .kv_transfer import KvOffer
from .later_fields import sent_if_set
from .lora import LoraReference
from .media import (
    MEDIA_DIGEST_BYTES,
    MEDIA_PIECE_BYTES,
    MediaItem,
    MediaTensors,
    TensorLayout,
    check_media,
    layout_of,
    media_pieces,
    num_layout_bytes,
)
from .pooling import Pooled, PoolingParams
from .replica_status import ReplicaStatus
from .sampling import SamplingParams
from .step import Logprobs, PromptLogprobs
from .structured_outputs import OutputConstraint

VERSION = 4


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """Prompt and settings of a sequence, in a gateway's Request as in the Submit to a scheduler.

    Attributes:
        request_id: the client's name for the request, for logs and errors.
        generated_token_ids: tokens that the sequence has generated on another replica. The output continues after
            them exactly as it would have there: limits, seeds and usage count from the sequence's start, and only
            new tokens are sent. Then there is one output: output i of n is submitted alone, with ``seed`` + i.
        sampling: validated by the gateway, with its seed set, so that any replica can run the sequence again.
            The gateway itself matches stop strings.
        tenant: the request's tenant, for the fair policy.
        priority: higher runs first; equal priorities run in order of arrival.
        timeout_s: seconds left to the deadline; None for no deadline.
        salt: prefixes are shared only between equal salts.
        prefix_pool: prefixes are shared with the other tenants of this pool; empty for the tenant's own alone.
        constraint: the compiled constraints of the sampling; None for an output without constraints.
        lora: the adapter; None for the model alone.
        pooling: the prompt's pooled vector is wanted instead of an output; None to generate.
        media: the images of the prompt, in order. Their tensors are sent when the replica asks for them.
        kv: blocks of the prompt and the generated tokens at the replica that the sequence left; None without any.
        prefill_only: the sequence leaves as MOVED with its first token, if its blocks can be lent.
        fetch_only: nothing is generated or answered. The blocks of `kv` are read into the prefix cache, because the
            sequence will come when the rest of its prompt has been computed. The first such message with a handle
            has the prompt; later ones with more blocks have none, and are those of the first otherwise.
        lend_only: nothing is generated. The first blocks of the prompt that are cached, on the device or on the host,
            are lent: a TokenBatch tells it with `lent`, or a Finish with an error that there are none.
    """

    request_id: str
    prompt_token_ids: IntArray
    generated_token_ids: IntArray = field(default_factory=lambda: NO_INTS, kw_only=True)
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""
    prefix_pool: str = ""
    constraint: OutputConstraint | None = sent_if_set(None)
    lora: LoraReference | None = sent_if_set(None)
    pooling: PoolingParams | None = sent_if_set(None)
    media: tuple[MediaItem, ...] = sent_if_set(())
    kv: KvOffer | None = sent_if_set(None)
    prefill_only: bool = sent_if_set(False)
    fetch_only: bool = sent_if_set(False)
    lend_only: bool = sent_if_set(False)

    def __post_init__(self) -> None:
        if self.media:
            check_media(self.media, len(self.prompt_token_ids))


@dataclass(frozen=True)
class _Handled:
    """A message about a sequence.

    Attributes:
        handle: the gateway's number for the sequence, unique among its running sequences.
    """

    handle: int


# A dataclass has the fields of its last base first, so the handle is the first on the wire.
@dataclass(frozen=True, slots=True)
class Submit(SequenceRequest, _Handled):
    """A sequence to run. With ``n`` outputs, output i has the handle ``handle + i``."""


class Abort(_Handled):
    """Aborts a sequence and frees its blocks; the scheduler sends no Finish. Unknown handles are ignored."""


class Stop(_Handled):
    """Ends a sequence in which the gateway found a stop string. Unlike after an Abort, its Finish is sent."""


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Requests a ReplicaStatus.

    Attributes:
        watch_s: for this time the replica sends its status, with the query_id 0, after each change as well: at most
            once per second, and to many gateways in turn, see `ReplicaStatus.num_report_rounds`.
        load_only: changes are those of its load and condition. The steps of canaries, which prove an idle replica to
            gateways, are none.
    """

    query_id: int
    watch_s: float = 0.0
    load_only: bool = False


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


@dataclass(frozen=True, slots=True)
class MediaWanted:
    """Asks for the tensors of images of a sequence, which wait for them; a MediaUpload of each image answers.

    Attributes:
        digests: of items of the Submit, each once.
    """

    handle: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class MediaUpload:
    """A piece of the tensors of an image. The pieces of an image are sent in order, without gaps.

    Any sequence may use an image's tensors once they are there: the digest names the tensors, and those who share
    them.

    Attributes:
        digest: of the MediaItem.
        layout: the tensors. Their bytes follow each other in this order, in C order each.
        offset: first byte of the piece.
        data: at most MEDIA_PIECE_BYTES.
    """

    digest: bytes
    layout: tuple[TensorLayout, ...]
    offset: int
    data: bytes

    def __post_init__(self) -> None:
        num_bytes = num_layout_bytes(self.layout)
        if type(self.digest) is not bytes or type(self.data) is not bytes:
            raise TypeError("an image's digest and tensors are bytes")
        if len(self.digest) != MEDIA_DIGEST_BYTES or len(self.data) > MEDIA_PIECE_BYTES:
            raise ValueError(
                f"a digest of {len(self.digest)} and a piece of {len(self.data)} bytes, must have "
                f"{MEDIA_DIGEST_BYTES} and at most {MEDIA_PIECE_BYTES}"
            )
        if not 0 <= self.offset <= num_bytes - len(self.data):
            raise ValueError(
                f"a piece at {self.offset} with {len(self.data)} bytes is outside tensors of {num_bytes} bytes"
            )


def media_uploads(digest: bytes, tensors: MediaTensors) -> Iterator[MediaUpload]:
    """Yield the messages that carry an image's tensors."""
    layout = layout_of(tensors)
    for offset, piece in media_pieces(tensors):
        yield MediaUpload(digest, layout, offset, piece)


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
    transfer_s: float = sent_if_set(0.0)


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
        weights_version: name of the weights that sampled the last token; empty for the weights of the start.
        kv: with reason MOVED, the sequence's blocks, for the replica that continues it; None without any.
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
    kv: KvOffer | None = sent_if_set(None)

    def to_error(self) -> QuireError:
        """Return the error of an end with reason ERROR."""
        return from_reason(self.error_reason, self.grpc_status, self.error, {}, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks of a prompt that is still being computed, for the replica that will continue the sequence."""

    handle: int
    kv: KvOffer


@dataclass(frozen=True, slots=True)
class Recall:
    """Requests the tokens that a request has so far, of a gateway that may have died; a Recalled answers.

    Attributes:
        seed: seed of the request's first output.
        num_outputs: number of the request's outputs.
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
        index: number of the output within its request.
        token_ids: [n] int32, the generated tokens.
        finish: with reason MOVED if the output is not complete. Its handle means nothing.
    """

    index: int
    token_ids: IntArray
    finish: Finish


def best_outputs(found: Iterable[RecalledOutput]) -> dict[int, RecalledOutput]:
    """Return index |-> the output that is complete, or else has the most tokens: it may have been moved."""

    def progress(output: RecalledOutput) -> tuple[bool, int]:
        return output.finish.reason is not FinishReason.MOVED, len(output.token_ids)

    best: dict[int, RecalledOutput] = {}
    for output in found:
        if output.index not in best or progress(output) > progress(best[output.index]):
            best[output.index] = output
    return best


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
        prompt_logprobs: log-probabilities of prompt tokens, by handle, in a batch of their own; sent in prompt order,
            and possibly a second time after a move.
        pooled: vectors by handle; the batch has the ends of their sequences too.
        lent: blocks of sequences that are `prefill_only`.
    """

    step_id: int
    handles: IntArray = field(default_factory=lambda: NO_INTS)
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: Logprobs | None = None
    finished: tuple[Finish, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Pooled | None = None
    lent: tuple[Lent, ...] = sent_if_set(())


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cached prefixes of a replica, in full or as a diff.

    Attributes:
        version: version of this state; a CacheQuery can ask for the changes since.
        since: the version to which `added` and `removed` apply. 0: `added` is the full state (of a very large
            cache, its newest part) and replaces every earlier one.
        added, removed: concatenated hashes of CACHE_HASH_BYTES each; see `digests.prefix_hashes`.
        window_blocks: last blocks of a prefix that must be cached for a hit; 0 for all blocks of the prefix.
    """

    version: int
    since: int
    added: bytes
    removed: bytes
    window_blocks: int = 0


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
    | MediaUpload
)
ReplicaMessage = (
    TokenBatch
    | ReplicaStatus
    | CacheReport
    | BlockMap
    | LoraLoaded
    | EngineControlled
    | Recalled
    | MediaWanted
)


_codec = FrameCodec[GatewayMessage | ReplicaMessage](
    "stream",
    VERSION,
    {
        "submit": Submit,
        "abort": Abort,
        "stop": Stop,
        "status?": StatusQuery,
        "cache?": CacheQuery,
        "blocks?": BlockMapQuery,
        "drain": Drain,
        "flush": FlushCache,
        "load lora": LoadLora,
        "lora": LoraLoaded,
        "control": ControlEngine,
        "controlled": EngineControlled,
        "recall": Recall,
        "recalled": Recalled,
        "media": MediaUpload,
        "media?": MediaWanted,
        "tokens": TokenBatch,
        "status": ReplicaStatus,
        "cache": CacheReport,
        "blocks": BlockMap,
    },
    exact=(Submit,),
)
encode, decode = _codec.encode, _codec.decode


def refusal_of(frame: bytes) -> TokenBatch | None:
    """Return the answer to a Submit that `decode` refused, for its gateway not to wait; None for other frames."""
    try:
        return _codec.read(frame, _refuse_submit)
    except ProtocolError:
        return None


def _refuse_submit(values: list[Any]) -> TokenBatch:
    tag, handle, request_id, _, _, sampling, *_ = values
    if tag != "submit":
        raise ValueError(f"no answer is due to {tag!r}")
    problem = (
        f"request {request_id}: the replica runs an earlier release, which lacks what the request asks for"
    )
    num_sequences = SamplingParams(*sampling[: num_always_sent(SamplingParams)]).num_sequences
    ends = (
        Finish(each, FinishReason.ERROR, grpc_status="UNAVAILABLE", error=problem)
        for each in range(handle, handle + num_sequences)
    )
    return TokenBatch(0, finished=tuple(ends))
