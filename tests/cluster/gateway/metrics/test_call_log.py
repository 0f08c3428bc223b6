"""CallLog: the lines of requests that end, are refused, moved and aborted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.gateway.metrics.call_log import CallLog
from quire.cluster.text.requests.observer import MoveCause
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished
from quire.cluster.text.requests.request import Request
from quire.proto.errors import InvalidRequest
from quire.proto.sampling import SamplingParams

CALL = GenerationCall("secret", SamplingParams(), request_id="mine", tenant="gold")
REQUEST = Request("mine", np.arange(5, dtype=np.int32), SamplingParams(max_tokens=9))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "quire")
    return caplog


def test_request_has_a_line_at_its_begin_and_its_end(lines: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = CallLog(clock).watch(CALL)
    watch.on_accepted("tiny", REQUEST)
    clock.now = 0.25
    watch.on_event(CompletionDelta(0, "secret", [1, 2]))
    clock.now = 1.5
    watch.on_moved("replica-1", MoveCause.DRAIN)
    watch.on_event(CompletionFinished(0, "length"))
    watch.on_end(None)
    assert [record.getMessage() for record in lines.records] == [
        "request mine began: tiny, 5 prompt tokens, max_tokens 9, n 1",
        "request mine lost its replica replica-1: drain",
        "request mine ended: length, 2 tokens, first token after 0.250 s, 1.500 s in all",
    ]
    last = vars(lines.records[-1])
    assert (last["request_id"], last["tenant"], last["model"]) == ("mine", "gold", "tiny")
    assert (last["num_tokens"], last["first_token_s"], last["total_s"]) == (2, 0.25, 1.5)
    assert "secret" not in str(vars(lines.records[0]))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            InvalidRequest("n", "is 0"),
            "request mine refused: invalid_request: n: is 0, 0 tokens, 0.000 s in all",
        ),
        (asyncio.CancelledError(), "request mine refused: aborted, 0 tokens, 0.000 s in all"),
    ],
)
def test_refused_request_has_one_line(
    lines: pytest.LogCaptureFixture, error: BaseException, line: str
) -> None:
    CallLog(Clock()).watch(CALL).on_end(error)
    assert [record.getMessage() for record in lines.records] == [line]
