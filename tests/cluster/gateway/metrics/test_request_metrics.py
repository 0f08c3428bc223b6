"""RequestMetrics: one request each way, with a fake clock."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.gateway.metrics import request_definitions
from quire.cluster.gateway.metrics.request_metrics import ModelRequests, RequestMetrics, reason_of
from quire.cluster.text.requests.observer import MoveCause, RequestWatch
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished, Usage
from quire.cluster.text.requests.request import Request
from quire.proto.errors import InvalidRequest, Overloaded, RankFailed, RequestAborted
from quire.proto.sampling import SamplingParams
from quire.proto.stream import Timings

CALL = GenerationCall("text", SamplingParams())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def accept(metrics: RequestMetrics, **params: Any) -> RequestWatch:
    watch = metrics.watch(CALL)
    sampling = SamplingParams(**({"max_tokens": 9} | params))
    watch.on_accepted("tiny", Request("r", np.arange(5, dtype=np.int32), sampling))
    return watch


def delta(num_tokens: int, index: int = 0) -> CompletionDelta:
    return CompletionDelta(index, "text", [7] * num_tokens)


def finished(index: int = 0, num_tokens: int = 5) -> CompletionFinished:
    times = Timings(queued_s=1.0, prefill_s=2.0, decode_s=4.0, preempted_s=0.5, recomputed_tokens=3)
    return CompletionFinished(index, "length", usage=Usage(5, num_tokens, 4), timings=times)


def sums(model: ModelRequests) -> dict[str, tuple[int, float]]:
    """Name without its prefix |-> (observations, their sum), of histograms with observations."""
    return {
        metric.name.removeprefix("vllm:"): (sum(value.counts), value.sum)
        for metric, value in model.histograms.items()
        if any(value.counts)
    }


def test_completed_request_is_counted_and_timed() -> None:
    clock = Clock()
    metrics = RequestMetrics(clock)
    watch = accept(metrics)
    clock.now = 3.0
    watch.on_event(delta(1))
    clock.now = 4.0
    watch.on_event(delta(4))
    watch.on_event(delta(0))
    clock.now = 7.0
    watch.on_event(finished())
    model = metrics.models["tiny"]
    assert model.num_open == 1
    watch.on_end(None)
    assert (model.num_open, model.num_prompt_tokens, model.num_generated_tokens) == (0, 5, 5)
    assert (model.num_cached_tokens, model.num_recomputed_tokens, model.preempted_s) == (4, 3, 0.5)
    assert (model.finished, model.errors, metrics.refusals) == ({"length": 1}, {}, {})
    assert sums(model) == {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (4, 1.0),
        "request_time_per_output_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 7.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 4.0),
        "request_inference_time_seconds": (1, 6.5),
        "request_prompt_tokens": (1, 5.0),
        "request_generation_tokens": (1, 5.0),
        "request_params_n": (1, 1.0),
        "request_params_max_tokens": (1, 9.0),
    }


def test_all_tokens_after_the_first_have_a_gap() -> None:
    """Also those that came together with the first one."""
    metrics = RequestMetrics(Clock())
    watch = accept(metrics)
    for num_tokens in (3, 0, 2):
        watch.on_event(delta(num_tokens))
    assert sum(metrics.models["tiny"].histograms[request_definitions.INTER_TOKEN_LATENCY].counts) == 4


def test_prompt_of_several_completions_counts_once() -> None:
    metrics = RequestMetrics(Clock())
    watch = accept(metrics, n=2)
    for index in range(2):
        watch.on_event(delta(1, index))
    model = metrics.models["tiny"]
    assert model.num_prompt_tokens == 5
    assert sum(model.histograms[request_definitions.TIME_TO_FIRST_TOKEN].counts) == 2


@pytest.mark.parametrize("end", [None, asyncio.CancelledError(), GeneratorExit(), RequestAborted("aborted")])
def test_caller_that_leaves_counts_as_abort(end: BaseException | None) -> None:
    metrics = RequestMetrics(Clock())
    watch = accept(metrics, n=3)
    watch.on_event(finished())
    watch.on_end(end)
    model = metrics.models["tiny"]
    assert (model.finished, model.errors) == ({"length": 1, "abort": 2}, {})


def test_error_of_a_running_request_counts_with_its_kind() -> None:
    metrics = RequestMetrics(Clock())
    accept(metrics).on_end(RankFailed(1, "it died"))
    accept(metrics).on_end(ZeroDivisionError())
    model = metrics.models["tiny"]
    assert (model.finished, model.errors) == ({"error": 2}, {"rank_failed": 1, "internal": 1})
    assert not metrics.refusals


def test_refused_request_counts_with_its_kind() -> None:
    metrics = RequestMetrics(Clock())
    metrics.watch(CALL).on_end(InvalidRequest("n", "is 0"))
    metrics.watch(CALL).on_end(Overloaded("full"))
    metrics.watch(CALL).on_end(asyncio.CancelledError())
    assert metrics.refusals == {"invalid_request": 1, "overloaded": 1}
    assert not metrics.models


def test_completion_that_survives_a_failed_replica_is_a_recovery() -> None:
    metrics = RequestMetrics(Clock())
    watch = accept(metrics, n=3)
    watch.on_moved("a", MoveCause.DRAIN)
    watch.on_moved("a", MoveCause.FAILURE)
    watch.on_event(finished(0))
    watch.on_event(finished(1))
    model = metrics.models["tiny"]
    assert (model.moves, model.num_recoveries) == ({"drain": 1, "failure": 1}, 1)


def test_reason_is_that_of_the_error_in_lower_case() -> None:
    assert reason_of(RequestAborted("r")) == "request_aborted"
    assert reason_of(KeyError()) == "internal"
