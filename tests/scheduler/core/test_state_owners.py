"""The owners of the scheduler's state: each part changes by its owner's verbs only."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from driver import Driver
from fakes import small_config

from quire.proto.errors import DeadlineExpired
from quire.proto.stream import FinishReason
from quire.scheduler.core.replies.outbox import Outbox
from quire.scheduler.core.replies.requests import RequestTable
from quire.scheduler.core.steps.in_flight import InFlightStep, InFlightSteps
from quire.scheduler.core.steps.plan_deltas import PlanDeltas
from quire.scheduler.sequences.sequence import Sequence

NO_ROWS = np.zeros(0, np.intp)


def test_views_of_the_state_are_read_only() -> None:
    driver = Driver(small_config())
    driver.add(0, [5, 6], max_tokens=4, ignore_eos=True)
    driver.step()
    state: Any = driver.scheduler._state
    for view in (state.running, state.alive, state.requests.gateways):
        assert len(view) == 1
        with pytest.raises(TypeError):
            view[9] = None
    with pytest.raises(ValueError, match="read-only"):
        state.rows.num_scheduled[0] = 1
    assert state.parents == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_scheduled_tokens", "scheduled tokens"),
        ("num_beam_rows", "rows of beams"),
        ("num_own_stop_rows", "stop tokens"),
    ],
)
def test_integrity_check_recounts_row_counters(name: str, message: str) -> None:
    driver = Driver(small_config())
    driver.add(0, [5, 6], max_tokens=4, ignore_eos=True, stop_token_ids=(3,))
    driver.add(1, [7, 8], max_tokens=4, beam_width=2)
    driver.step()
    driver.scheduler.check_integrity()
    rows: Any = driver.scheduler._state.rows
    setattr(rows, name, getattr(rows, name) + 1)
    with pytest.raises(AssertionError, match=message):
        driver.scheduler.check_integrity()


def test_integrity_check_finds_outdated_advancing_rows() -> None:
    driver = Driver(small_config())
    driver.add(0, [5, 6], max_tokens=4, ignore_eos=True)
    driver.step()
    rows: Any = driver.scheduler._state.rows
    assert rows.advancing().tolist() == [0]
    rows._frozen[0] = True
    with pytest.raises(AssertionError, match="outdated"):
        driver.scheduler.check_integrity()


def test_outbox_take_empties_it() -> None:
    outbox = Outbox()
    outbox.fail(b"a", [1, 2], DeadlineExpired("too late"))
    ((gateway, batch),) = outbox.take()
    assert gateway == b"a"
    assert [(finish.handle, finish.reason) for finish in batch.finished] == [
        (1, FinishReason.ERROR), (2, FinishReason.ERROR),
    ]  # fmt: skip
    assert batch.finished[0].grpc_status == "DEADLINE_EXCEEDED"
    assert outbox.take() == []


def test_plan_deltas_drop_the_token_of_a_released_row() -> None:
    deltas = PlanDeltas()
    deltas.select_token(3, 30)
    deltas.select_token(4, 40)
    deltas.release_row(3)
    released, rows, token_ids = deltas.take()
    assert (released.tolist(), rows.tolist(), token_ids.tolist()) == ([3], [4], [40])
    assert [array.size for array in deltas.take()] == [0, 0, 0]


def test_step_ids_count_from_one_and_are_not_reused() -> None:
    steps = InFlightSteps()
    assert (steps.next_id, steps.newest_id, steps.oldest) == (1, None, None)
    steps.add(InFlightStep(1, NO_ROWS, [], 0, 0.0))
    steps.pop()
    assert (len(steps), steps.next_id) == (0, 2)
    with pytest.raises(AssertionError, match="step 1 was planned, 2 is next"):
        steps.add(InFlightStep(1, NO_ROWS, [], 0, 0.0))


def test_gateway_numbers_are_not_reused() -> None:
    driver = Driver(small_config())
    requests: RequestTable = driver.scheduler._state.requests
    driver.add(0, [5], gateway=b"a", max_tokens=3)
    driver.scheduler.drop_gateway(b"a", 0.0)
    driver.add(1, [5], gateway=b"b", max_tokens=3)
    assert dict(requests.gateways) == {b"b": 1}
    assert len(requests) == 1


def test_gateways_without_requests_are_forgotten() -> None:
    driver = Driver(small_config())
    for number in range(19):
        driver.add(number, [5], gateway=b"%d" % number, max_tokens=1)
        driver.run()
    driver.add(19, [5], gateway=b"beams", max_tokens=2, n=2, beam_width=2)
    driver.run()
    driver.add(30, [5], gateway=b"last", max_tokens=3)
    driver.step()
    assert driver.scheduler.gateways == (b"last",)


def test_tokens_are_split_by_gateway_in_one_pass() -> None:
    requests, numbers = RequestTable(), np.array([2, 0, 2, 1, 0], np.int32)
    for handle, gateway in enumerate((b"a", b"b", b"c", b"gone")):
        requests.add((gateway, handle), cast(Sequence, None))
    requests.remove((b"gone", 3))
    split = {gateway: indices.tolist() for gateway, indices in requests.by_gateway(numbers)}
    assert split == {b"a": [1, 4], b"b": [3], b"c": [0, 2]}
    assert list(requests.by_gateway(numbers[:0])) == []
    requests.forget_idle()
    assert list(requests.gateways) == [b"a", b"b", b"c"]
    requests.remove((b"a", 0))
    requests.add((b"a", 4), cast(Sequence, None))
    requests.forget_idle()
    assert list(requests.gateways) == [b"a", b"b", b"c"]


def test_queue_is_measured_without_a_look_at_each_waiting_request() -> None:
    counts = []
    for num_waiting in (5, 50):
        driver = Driver(small_config())
        for handle in range(num_waiting):
            driver.add(handle, [5, 6, 7], max_tokens=3)
        num_calls = 0

        def on_event(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += 1

        sys.setprofile(on_event)
        try:
            num_tokens, wait_s = driver.scheduler.num_queued_tokens, driver.scheduler.oldest_wait_s(1.0)
        finally:
            sys.setprofile(None)
        assert (num_tokens, wait_s) == (3 * num_waiting, 1.0)
        counts.append(num_calls)
    assert counts[0] == counts[1]
