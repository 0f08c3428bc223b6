"""Messages between gateways and schedulers round-trip; unreadable ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.proto.block_map import BlockMap, BlockState, MappedSequence
from quire.proto.errors import ProtocolError
from quire.proto.lora import LoraReference
from quire.proto.media import MAX_MEDIA_BYTES, MediaAssembly, MediaItem, TensorLayout, layout_of, media_pieces
from quire.proto.pooling import Pooled, PoolingParams
from quire.proto.replica_status import RankStatus, ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.step import Logprobs, PromptLogprobs
from quire.proto.stream import (
    VERSION,
    Abort,
    BlockMapQuery,
    CacheQuery,
    CacheReport,
    Drain,
    Finish,
    FinishReason,
    FlushCache,
    GatewayMessage,
    LoadLora,
    LoraLoaded,
    MediaUpload,
    MediaWanted,
    Recall,
    Recalled,
    RecalledOutput,
    ReplicaMessage,
    StatusQuery,
    Submit,
    Timings,
    TokenBatch,
    decode,
    encode,
    media_uploads,
    refusal_of,
)

# Fields of SamplingParams when VERSION became 4.
NUM_SAMPLING_FIELDS = 27

LORA = LoraReference("sql", "/adapters/sql", "1")
DIGEST = b"0123456789abcdef"
PATCHES = TensorLayout("pixel_values", "<f4", (2, 3))
STATUS = ReplicaStatus(
    query_id=4,
    replica_id="replica-1",
    model="demo",
    problem="",
    ranks=(RankStatus(0, 11, "host", "cpu", "idle"), RankStatus(1, 12, "host", "cuda:1", "step")),
    block_size=16,
    num_blocks=100,
    num_used_blocks=7,
    num_cached_blocks=3,
    peak_used_blocks=50,
    num_used_tokens=99,
    mean_kv_fragmentation=0.125,
    prefix_query_tokens=1000,
    prefix_hit_tokens=250,
    num_host_blocks=40,
    num_used_host_blocks=6,
    num_cached_host_blocks=5,
    num_swapped_blocks=17,
    num_waiting=1,
    num_running=2,
    num_finished=3,
    num_preemptions=4,
    num_steps=5,
    uptime_s=6.5,
    draining=True,
    queued_tokens=321,
    kv_use=0.07,
    oldest_wait_s=0.5,
    tokens_per_s=1234.5,
    cache_version=77,
    num_fenced_blocks=2,
    num_computed_tokens=12345,
    busy_s=5.5,
    num_plan_waits=4,
    plan_wait_s=0.25,
    max_num_seqs=32,
    num_compilations=3,
    num_drafts=9,
    num_draft_tokens=20,
    num_accepted_tokens=(7, 3),
    loras=(LORA, LoraReference("law", "", "2")),
    fullest_kv_use=0.5,
)
REPORT = CacheReport(12, 5, b"12345678abcdefgh", b"ABCDEFGH")


@pytest.mark.parametrize(
    "message",
    [
        Abort(7),
        StatusQuery(2**40),
        STATUS,
        CacheQuery(5),
        REPORT,
        BlockMapQuery(9),
        Drain(2.5),
        FlushCache(),
        LoadLora(3, LORA),
        LoraLoaded(3, "why"),
        Recall(3, "tenant", "r", 2**63 - 1, 2, b"digest"),
        Recalled(3),
        MediaWanted(3, (DIGEST,)),
        MediaUpload(DIGEST, (PATCHES,), 8, b"12345678"),
    ],
    ids=type,
)
def test_plain_messages_round_trip(message: GatewayMessage | ReplicaMessage) -> None:
    assert decode(encode(message)) == message


def test_recalled_outputs_round_trip() -> None:
    finish = Finish(0, FinishReason.MOVED, timings=Timings(0.5), num_cached_tokens=4)
    got = decode(encode(Recalled(3, (RecalledOutput(1, np.array([5, 6], np.int32), finish),))))
    assert isinstance(got, Recalled)
    (output,) = got.outputs
    assert (output.index, output.token_ids.tolist(), output.finish) == (1, [5, 6], finish)


def test_block_map_round_trips() -> None:
    states = bytes((BlockState.HELD, BlockState.CACHED))
    sequences = (MappedSequence(3, "r", 2, 17, 9),)
    slots = bytes((BlockState.CACHED,)), np.array([-1], np.int32)
    sent = BlockMap(7, 4, 2, states, np.array([3, -1], np.int32), sequences, *slots)
    got = decode(encode(sent))
    assert isinstance(got, BlockMap)
    assert (got.slot_states, got.slot_rows.tolist()) == (slots[0], [-1])
    assert (got.query_id, got.num_blocks, got.stride, got.states, got.sequences) == (
        7,
        4,
        2,
        states,
        sequences,
    )
    assert got.rows.tolist() == [3, -1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, logprobs=0, seed=-(2**63)),
        SamplingParams(
            max_tokens=9, min_tokens=3, temperature=0.0, top_k=4, top_p=0.5, min_p=0.1, seed=1, stop=("é\n", "."),
            stop_token_ids=(1, 2), ignore_eos=True, logprobs=20,
        ),
        SamplingParams(
            repetition_penalty=1.5, frequency_penalty=-2.0, presence_penalty=0.5, logit_bias={7: 1.5, 3: -100},
            bad_words=("é", (1, 2), (3,)), allowed_token_ids=(5, 4), prompt_logprobs=0, skip_special_tokens=False,
            include_stop_str_in_output=True, truncate_prompt_tokens=9,
        ),
    ],
)  # fmt: skip
def test_submit_round_trip(sampling: SamplingParams) -> None:
    prompt, generated = np.array([0, 5, 3071], np.int32), np.array([7, 8], np.int32)
    sent = Submit(
        2**31 - 1,
        "naïve id",
        prompt,
        sampling,
        "tenant",
        2,
        1.5,
        b"salt",
        "pool",
        generated_token_ids=generated,
    )
    received = decode(encode(sent))
    assert isinstance(received, Submit)
    assert (received.handle, received.request_id, received.sampling) == (
        sent.handle,
        sent.request_id,
        sampling,
    )
    assert (received.tenant, received.priority, received.timeout_s) == ("tenant", 2, 1.5)
    assert (received.salt, received.prefix_pool) == (b"salt", "pool")
    np.testing.assert_array_equal(received.prompt_token_ids, sent.prompt_token_ids)
    np.testing.assert_array_equal(received.generated_token_ids, generated)


def test_token_batch_round_trip() -> None:
    finished = (
        Finish(3, FinishReason.STOP, 17, 5, 6, 4, Timings(0.1, 0.2, 0.3, 0.4, 5)),
        Finish(4, FinishReason.ERROR, grpc_status="UNAVAILABLE", error="rank 1 failed"),
        Finish(5, FinishReason.MOVED, num_prompt_tokens=5, num_completion_tokens=2),
        Finish(6, FinishReason.ERROR, grpc_status="RESOURCE_EXHAUSTED", retry_after_s=0.5),
    )
    logprobs = Logprobs(
        np.array([1], np.int32),
        np.array([-0.5], np.float32),
        np.array([3], np.int32),
        np.array([[9, 8]], np.int32),
        np.ones((1, 2), np.float32),
    )
    scores = PromptLogprobs(np.array([4], np.int32), logprobs)
    handles, token_ids = np.array([3, 3, 4], np.int32), np.array([10, 11, 12], np.int32)
    sent = TokenBatch(8, handles, token_ids, logprobs, finished, scores)
    received = decode(encode(sent))
    assert isinstance(received, TokenBatch)
    assert (received.step_id, received.finished) == (8, finished)
    np.testing.assert_array_equal(received.handles, sent.handles)
    np.testing.assert_array_equal(received.token_ids, sent.token_ids)
    assert received.logprobs is not None
    np.testing.assert_array_equal(received.logprobs.top_ids, logprobs.top_ids)
    np.testing.assert_array_equal(received.logprobs.ranks, logprobs.ranks)
    assert received.prompt_logprobs is not None
    np.testing.assert_array_equal(received.prompt_logprobs.owners, scores.owners)
    np.testing.assert_array_equal(received.prompt_logprobs.logprobs.top, logprobs.top)


@pytest.mark.parametrize("body", [b"\x91", b"\x91\xa4what", b"\x90", b"\x92\xa5abort"])
def test_unreadable_message_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(bytes((VERSION,)) + body)


@pytest.mark.parametrize("frame", [b"", b"\x00\x91", bytes((VERSION - 1,)) + encode(Abort(7))[1:]])
def test_other_version_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="version"):
        decode(frame)


@given(st.binary(max_size=64))
def test_random_bytes_raise_only_protocol_errors(garbage: bytes) -> None:
    with suppress(ProtocolError):
        decode(bytes((VERSION,)) + garbage)


@given(st.integers(0, 2), st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_damaged_message_raises_only_protocol_errors(kind: int, place: int, damage: bytes) -> None:
    prompt, sampling = (
        np.array([1, 2], np.int32),
        SamplingParams(logit_bias={1: 2.0}, bad_words=((1, 2), "a")),
    )
    batch = TokenBatch(1, prompt, prompt, finished=(Finish(3, FinishReason.STOP),))
    frame = bytearray(encode((Submit(1, "id", prompt, sampling), batch, REPORT)[kind]))
    start = 1 + place % (len(frame) - 1)
    frame[start : start + len(damage)] = damage
    with suppress(ProtocolError):
        decode(bytes(frame))


def test_invalid_sampling_params_in_a_message_are_a_protocol_error() -> None:
    frame = encode(Submit(1, "id", np.array([1], np.int32), SamplingParams(max_tokens=5)))
    with pytest.raises(ProtocolError, match="max_tokens"):
        decode(frame.replace(b"\x05\x00\xc0", b"\x00\x00\xc0"))


def with_values(message: GatewayMessage | ReplicaMessage, change: Callable[[list[Any]], list[Any]]) -> bytes:
    """Return the frame of a message after a change of its values, as another release might send it."""
    frame = encode(message)
    return frame[:1] + msgpack.packb(change(msgpack.unpackb(frame[1:])))


@pytest.mark.parametrize(
    "message",
    [
        Abort(7),
        StatusQuery(4),
        STATUS,
        CacheQuery(5),
        REPORT,
        BlockMapQuery(9),
        Drain(2.5),
        FlushCache(),
        LoraLoaded(3),
        Recall(3, "", "r", 5, 1, b""),
        Recalled(3),
        MediaWanted(3, (DIGEST,)),
        MediaUpload(DIGEST, (PATCHES,), 0, b"1"),
    ],
    ids=type,
)
def test_fields_of_a_later_release_are_ignored(message: GatewayMessage | ReplicaMessage) -> None:
    assert decode(with_values(message, lambda values: [*values, "later", 1])) == message


def test_fields_of_a_later_release_in_parts_of_a_message_are_ignored() -> None:
    finish = Finish(
        3, FinishReason.STOP, 17, 5, 6, 4, Timings(0.1, 0.2, 0.3, 0.4, 5), 0.5, "UNAVAILABLE", "rank 1"
    )  # fmt: skip

    def extend(values: list[Any]) -> list[Any]:
        (ended,) = values[5]
        ended[6] += [0.0, "later"]  # 0.0 for `transfer_s`, which is not set
        return [
            *values[:5],
            [[*ended, None, "later"]],
            *values[6:],
            [],
            "later",
        ]  # None for `kv` and [] for `lent`, which are not set

    received = decode(with_values(TokenBatch(8, finished=(finish,)), extend))
    assert isinstance(received, TokenBatch)
    assert received.finished == (finish,)
    status = decode(
        with_values(STATUS, lambda values: [*values[:5], [[*rank, "", 1] for rank in values[5]], *values[6:]])
    )
    assert status == STATUS


def test_status_of_an_earlier_release_has_defaults() -> None:
    received = decode(with_values(STATUS, lambda values: values[:-55]))
    assert received == replace(
        STATUS, num_draft_tokens=0, num_accepted_tokens=(), loras=(), fullest_kv_use=0.0
    )


def test_end_of_an_earlier_release_has_defaults() -> None:
    finish = Finish(3, FinishReason.STOP, num_prompt_tokens=5)
    frame = with_values(
        TokenBatch(8, finished=(finish,)), lambda values: [*values[:5], [values[5][0][:-1]], *values[6:]]
    )
    received = decode(frame)
    assert isinstance(received, TokenBatch)
    assert received.finished == (finish,)


def test_submit_with_an_adapter_round_trips_and_is_refused_unless_it_is_text() -> None:
    submit = Submit(1, "id", np.array([1], np.int32), SamplingParams(), lora=LORA)
    received = decode(encode(submit))
    assert isinstance(received, Submit)
    assert (received.lora, received.constraint) == (LORA, None)
    with pytest.raises(ProtocolError, match="an adapter's name, path and version are text"):
        decode(with_values(submit, lambda values: [*values[:-1], ["sql", 7]]))


def test_every_sampling_parameter_of_this_version_is_sent() -> None:
    sent = msgpack.unpackb(encode(Submit(1, "id", np.array([1], np.int32), SamplingParams()))[1:])
    # Later fields need defaults, and stay away while they are unset. See the module's docstring.
    assert len(sent[5]) == NUM_SAMPLING_FIELDS


@pytest.mark.parametrize(
    "extend",
    [
        lambda values: [*values, "later"],
        lambda values: [*values[:5], [*values[5], *["later"] * 99], *values[6:]],
    ],
    ids=["submit", "sampling"],
)
def test_request_with_a_setting_of_a_later_release_is_refused(
    extend: Callable[[list[Any]], list[Any]],
) -> None:
    frame = with_values(Submit(9, "id", np.array([1], np.int32), SamplingParams(n=2)), extend)
    with pytest.raises(ProtocolError):
        decode(frame)
    answer = refusal_of(frame)
    assert answer is not None
    assert [(end.handle, end.reason, end.grpc_status) for end in answer.finished] == [
        (9, FinishReason.ERROR, "UNAVAILABLE"),
        (10, FinishReason.ERROR, "UNAVAILABLE"),
    ]
    assert "earlier release" in answer.finished[0].error
    assert refusal_of(encode(Abort(3))) is None
    assert refusal_of(b"\x00garbage") is None


def test_pooled_submit_and_its_vectors_round_trip() -> None:
    sent = Submit(1, "id", np.array([1], np.int32), SamplingParams(), pooling=PoolingParams(8, False, -1))
    received = decode(encode(sent))
    assert isinstance(received, Submit)
    assert (received.pooling, received.constraint) == (sent.pooling, None)
    vectors = Pooled(
        np.array([4, 9], np.int32), np.array([1, 2], np.int32), np.array([0.5, 1.0, -2.0], np.float32)
    )
    batch = decode(encode(TokenBatch(3, pooled=vectors)))
    assert isinstance(batch, TokenBatch)
    assert {handle: vector.tolist() for handle, vector in batch.pooled or ()} == {4: [0.5], 9: [1.0, -2.0]}


def test_batch_of_a_release_without_vectors_is_read() -> None:
    received = decode(with_values(TokenBatch(3), lambda values: values[:-1]))
    assert isinstance(received, TokenBatch)
    assert received.pooled is None


def test_vectors_of_wrong_lengths_are_a_protocol_error() -> None:
    right = Pooled(np.array([4], np.int32), np.array([1], np.int32), np.array([0.5], np.float32))
    one, two = (np.array([count], "<i4").tobytes() for count in (1, 2))
    frame = encode(TokenBatch(3, pooled=right))
    with pytest.raises(ProtocolError, match="1 values for vectors of"):
        decode(frame.replace(one, two))


def test_submit_with_images_round_trips_and_one_without_is_as_before() -> None:
    prompt = np.arange(9, dtype=np.int32)
    items = (MediaItem(DIGEST, 1, 3, 2, (1, 2, 4), 96, 1.5), MediaItem(DIGEST, 4, 5, 5))
    received = decode(encode(Submit(1, "id", prompt, SamplingParams(), media=items)))
    assert isinstance(received, Submit)
    assert (received.media, received.pooling) == (items, None)
    assert len(msgpack.unpackb(encode(Submit(1, "id", prompt, SamplingParams()))[1:])) == 11


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([[DIGEST, 7, 3, 3]], "between 0 and 9"),
        ([[DIGEST, 2, 3, 3], [DIGEST, 4, 2, 2]], "between 5 and 9"),
        ([[DIGEST, -1, 3, 3]], "3 embeddings for 3 tokens from -1"),
        ([[DIGEST, 1, 2, 3]], "3 embeddings for 2 tokens"),
        ([[DIGEST, 1, 0, 0]], "0 embeddings for 0 tokens"),
        ([[DIGEST[1:], 1, 2, 2]], "15 bytes, must have 16"),
        ([[DIGEST, 1, 2, 2, [1, 0, 2]]], "grid"),
        ([[DIGEST, 1, 2, 2, [1, 2]]], "grid"),
        ([[DIGEST, 1, 2, 2, [], MAX_MEDIA_BYTES + 1]], "bytes, must have at most"),
        ([[DIGEST, 1, 2, 2, [1, 2, 4], 9, float("nan")]], "a time step of nan, must have 0 to"),
        ([[DIGEST, 1, 2, 2, [1, 2, 4], 9, -1.0]], "a time step of -1"),
        ([[DIGEST, "1", 2, 2]], "cannot be read"),
    ],
)
def test_images_at_impossible_places_are_a_protocol_error(items: list[Any], problem: str) -> None:
    submit = Submit(
        1, "id", np.arange(9, dtype=np.int32), SamplingParams(), media=(MediaItem(DIGEST, 1, 1, 1),)
    )
    with pytest.raises(ProtocolError, match=problem):
        decode(with_values(submit, lambda values: [*values[:-1], items]))


def test_tensors_of_an_image_arrive_in_pieces() -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "pixel_values": rng.standard_normal((300, 1176)).astype(np.float32),
        "grid": np.array([[1, 10, 30]]),
        "mask": np.ones((2, 3), bool),
    }
    messages = [decode(encode(each)) for each in media_uploads(DIGEST, tensors)]
    assert len(messages) == 4
    first = messages[0]
    assert isinstance(first, MediaUpload)
    assembly = MediaAssembly(first.layout)
    for message in [*messages, first]:  # a piece may come a second time
        assert isinstance(message, MediaUpload)
        assert message.digest == DIGEST
        assembly.add(message.offset, message.data)
    assert assembly.is_complete
    received = assembly.tensors()
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        np.testing.assert_array_equal(received[name], tensor)


def test_pieces_of_an_earlier_upload_are_ignored() -> None:
    tensors = {"pixel_values": np.arange(8, dtype=np.float32)}
    first, second = media_pieces(tensors, piece_bytes=16)
    assembly = MediaAssembly(layout_of(tensors))
    assembly.add(*second)
    assert not assembly.is_complete
    assembly.add(*first)
    assert not assembly.is_complete
    assembly.add(*second)
    np.testing.assert_array_equal(assembly.tensors()["pixel_values"], tensors["pixel_values"])
    with pytest.raises(ValueError, match="at bytes 32 to 48 of 32"):
        assembly.add(32, b"x" * 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({1: [["pixel_values", "<f8", [2, 3]]]}, "type '<f8'"),
        ({1: [["pixel_values", "|O8", [2, 3]]]}, "type"),
        ({1: [["pixel_values", "<f4", [2, -3]]]}, "shape"),
        ({1: [["pixel_values", "<f4", [2, 2.5]]]}, "shape"),
        ({1: [["pixel_values", "<f4", [1 << 40, 1 << 40]]]}, "shape"),
        ({1: [["pixel_values", "<f4", [1] * 7]]}, "shape"),
        ({1: [["", "<f4", [2, 3]]]}, "name"),
        ({1: []}, "0 tensors"),
        ({1: [["a", "<f4", [2]], ["a", "<f4", [4]]]}, "2 tensors of 1 names"),
        ({1: [["a", "<f4", [1 << 26]], ["b", "<f4", [1 << 27]]]}, "at most 8 of different names"),
        ({0: b"short"}, "a digest of 5"),
        ({2: 17}, "a piece at 17 with 8 bytes is outside tensors of 24 bytes"),
        ({2: -1}, "outside"),
        ({3: b"x" * 25}, "outside"),
        ({3: "text"}, "cannot be read"),
    ],
)
def test_tensors_of_impossible_shapes_are_a_protocol_error(change: dict[int, Any], problem: str) -> None:
    upload = MediaUpload(DIGEST, (PATCHES,), 16, b"12345678")

    def changed(values: list[Any]) -> list[Any]:
        return [values[0], *(change.get(index, value) for index, value in enumerate(values[1:]))]

    with pytest.raises(ProtocolError, match=problem):
        decode(with_values(upload, changed))
