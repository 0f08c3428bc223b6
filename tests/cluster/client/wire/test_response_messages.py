"""Outputs cross the network unchanged, except for what the server does not send."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    Logprob,
    PromptLogprobsDelta,
    RequestOutput,
    RequestStarted,
    SamplingParams,
    StreamEvent,
    Timings,
    Usage,
)
from quire.cluster.client.wire.response_messages import (
    event_from_message,
    event_to_message,
    output_from_message,
    output_to_message,
)
from quire.cluster.text.requests.outputs import most_likely, position_logprobs
from quire.proto import inference_pb2
from quire.proto.errors import ProtocolError

# The first position's token is the second most likely one, the second position's is not among the most likely.
LOGPROBS = [
    position_logprobs(7, -1.5, 2, [9, 7], [-0.5, -1.5]),
    position_logprobs(8, -4.0, 3, [3, 9], [-0.25, -2.0]),
]
SAMPLING = SamplingParams(logprobs=2, prompt_logprobs=2)
COMPLETION = CompletionOutput(
    index=0,
    text="ab",
    token_ids=[7, 8],
    finish_reason="stop",
    stop_reason="x",
    logprobs=LOGPROBS,
    cumulative_logprob=-5.5,
    score=-2.0,
    usage=Usage(3, 2, 1),
    timings=Timings(0.5, 0.25, 1.0, 0.125, 4, 2),
)
OUTPUT = RequestOutput("id", "tiny", None, [5, 7, 8], [COMPLETION, replace(COMPLETION, index=1)])


def over_the_wire(output: RequestOutput) -> RequestOutput:
    message = inference_pb2.GenerateResponse.FromString(
        output_to_message(output, SAMPLING).SerializeToString()
    )
    return output_from_message(message, output.prompt, output.prompt_token_ids)


@pytest.mark.parametrize(
    "output",
    [
        OUTPUT,
        replace(OUTPUT, prompt_logprobs=[None, *LOGPROBS]),
        replace(OUTPUT, prompt_token_ids=[5], prompt_logprobs=[None]),
        replace(
            OUTPUT,
            outputs=[
                replace(COMPLETION, logprobs=None, cumulative_logprob=None, score=None, stop_reason=reason)
                for reason in (None, 42)
            ],
        ),
        replace(OUTPUT, outputs=[replace(COMPLETION, finish_reason="length", stop_reason=None)]),
    ],
)
def test_output_is_the_same_after_the_wire(output: RequestOutput) -> None:
    received = over_the_wire(output)
    assert received == output
    for one, other in zip(received.outputs, output.outputs, strict=True):
        assert (one.usage, one.timings) == (other.usage, other.timings)


@pytest.mark.parametrize(
    "event",
    [
        RequestStarted("id", "tiny", 3),
        PromptLogprobsDelta(1, [7, 8], LOGPROBS),
        CompletionDelta(1, "ab", [7, 8], LOGPROBS, sequence_number=4),
        CompletionDelta(0, "text without a token", [], is_last=True),
        CompletionFinished(1, "stop", 42, Usage(3, 2, 1), Timings(0.5), -5.5, -2.0),
    ],
)
def test_event_is_the_same_after_the_wire(event: StreamEvent) -> None:
    message = inference_pb2.GenerateEvent.FromString(event_to_message(event, SAMPLING).SerializeToString())
    assert event_from_message(message) == event


def test_position_logprobs_begin_with_the_position_s_token() -> None:
    first, second = LOGPROBS
    assert list(first.items()) == [(7, Logprob(-1.5, 2)), (9, Logprob(-0.5, 1))]
    assert list(second.items()) == [(8, Logprob(-4.0, 3)), (3, Logprob(-0.25, 1)), (9, Logprob(-2.0, 2))]


def test_message_has_only_the_requested_number_of_top_tokens() -> None:
    """The position's own token may rank next, which leaves it out of the top tokens."""
    delta = CompletionDelta(0, "ab", [7, 8], LOGPROBS)
    sent = event_to_message(delta, SAMPLING).delta.logprobs[1]
    assert (sent.rank, list(sent.top_token_ids)) == (3, [3, 9])
    alone = CompletionDelta(0, "a", [7], [position_logprobs(7, -0.1, 1, [], [])])
    sent = event_to_message(alone, SamplingParams(logprobs=0)).delta.logprobs[0]
    assert (sent.rank, list(sent.top_token_ids)) == (1, [])


def test_token_tied_with_the_top_tokens_ranks_behind_them() -> None:
    entry = position_logprobs(8, -1.0, 1, [3, 9], [-1.0, -1.0])
    assert {token_id: logprob.rank for token_id, logprob in entry.items()} == {8: 3, 3: 1, 9: 2}
    assert [token_id for token_id, _ in most_likely(entry, 2)] == [3, 9]


def test_usage_of_a_request_counts_its_prompt_once() -> None:
    assert OUTPUT.usage == Usage(3, 4, 1)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (inference_pb2.GenerateEvent(), "does not support"),
        (inference_pb2.GenerateEvent(finished=inference_pb2.Finished()), "finish reason 0"),
        (
            inference_pb2.GenerateEvent(
                prompt_logprobs=inference_pb2.PromptLogprobs(
                    start=1, logprobs=[inference_pb2.TokenLogprobs(chosen=-1.0)]
                )
            ),
            "1 log-probabilities for 0 tokens",
        ),
    ],
)
def test_event_of_another_version_is_a_protocol_error(
    message: inference_pb2.GenerateEvent, problem: str
) -> None:
    with pytest.raises(ProtocolError, match=problem):
        event_from_message(message)
