"""What gateways and schedulers say to each other arrives as it was sent, or is refused."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.proto.errors import ProtocolError
from quire.proto.sampling import SamplingParams
from quire.proto.step import Logprobs
from quire.proto.stream import (
    Abort,
    Finish,
    FinishReason,
    RankStatus,
    ReplicaStatus,
    StatusQuery,
    Submit,
    Timings,
    TokenBatch,
    decode,
    encode,
)

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
    mean_waste=0.125,
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
)


@pytest.mark.parametrize("message", [Abort(7), StatusQuery(2**40), STATUS])
def test_plain_messages_round_trip(message: Abort | StatusQuery | ReplicaStatus) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, logprobs=0, seed=-(2**63)),
        SamplingParams(
            max_tokens=9, min_tokens=3, temperature=0.0, top_k=4, top_p=0.5, min_p=0.1, seed=1, stop=("é\n", "."),
            stop_token_ids=(1, 2), ignore_eos=True, logprobs=20,
        ),
    ],
)  # fmt: skip
def test_submit_round_trip(sampling: SamplingParams) -> None:
    sent = Submit(2**31 - 1, "naïve id", np.array([0, 5, 3071], np.int32), sampling)
    received = decode(encode(sent))
    assert isinstance(received, Submit)
    assert (received.handle, received.request_id, received.sampling) == (
        sent.handle,
        sent.request_id,
        sampling,
    )
    np.testing.assert_array_equal(received.prompt_token_ids, sent.prompt_token_ids)


def test_token_batch_round_trip() -> None:
    finished = (
        Finish(3, FinishReason.STOP, 17, 5, 6, 4, Timings(0.1, 0.2, 0.3, 0.4, 5)),
        Finish(4, FinishReason.ERROR, grpc_status="UNAVAILABLE", error="rank 1 failed"),
    )
    logprobs = Logprobs(
        np.array([1], np.int32),
        np.array([-0.5], np.float32),
        np.array([[9, 8]], np.int32),
        np.ones((1, 2), np.float32),
    )
    sent = TokenBatch(8, np.array([3, 3, 4], np.int32), np.array([10, 11, 12], np.int32), logprobs, finished)
    received = decode(encode(sent))
    assert isinstance(received, TokenBatch)
    assert (received.step_id, received.finished) == (8, finished)
    np.testing.assert_array_equal(received.handles, sent.handles)
    np.testing.assert_array_equal(received.token_ids, sent.token_ids)
    assert received.logprobs is not None
    np.testing.assert_array_equal(received.logprobs.top_ids, logprobs.top_ids)


@pytest.mark.parametrize("frame", [b"", b"\x00\x91", b"\x01\x91\xa4what", b"\x01\x90", b"\x01\x92\xa5abort"])
def test_unreadable_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


@given(st.binary(max_size=64))
def test_garbage_never_raises_anything_else(garbage: bytes) -> None:
    with suppress(ProtocolError):
        decode(b"\x01" + garbage)


def test_sampling_that_no_gateway_lets_through_is_refused() -> None:
    frame = encode(Submit(1, "id", np.array([1], np.int32), SamplingParams(max_tokens=5)))
    with pytest.raises(ProtocolError, match="max_tokens"):
        decode(frame.replace(b"\x05\x00\xcb", b"\x00\x00\xcb"))
