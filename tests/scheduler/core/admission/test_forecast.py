"""Refusal of requests that cannot be complete before their deadlines."""

from __future__ import annotations

import pytest
from driver import Driver
from fakes import random_prompt, small_config
from narrowing import not_none

from quire.scheduler.core.admission.forecast import CONGESTION_S

STEP_S = 0.1


def measured_driver(**options: object) -> Driver:
    """Return a replica whose steps take STEP_S, however many rows they have."""
    driver = Driver(small_config(**({"max_num_seqs": 2, "num_blocks": 200} | options)))  # type: ignore[arg-type]
    driver.scheduler._state.pace.observe_step(STEP_S)
    return driver


def add(driver: Driver, handle: int, num_steps: int, timeout_s: float | None = None, tenant: str = "") -> str:
    """Submit a request; return the gRPC status and the delay of its refusal."""
    refusal = driver.add(
        handle,
        random_prompt(4, handle),
        max_tokens=num_steps,
        ignore_eos=True,
        timeout_s=timeout_s,
        tenant=tenant,
    )
    return "" if refusal is None else refusal.grpc_status


def test_request_that_waits_too_long_is_refused_at_once() -> None:
    driver = measured_driver()
    for handle in range(6):
        assert add(driver, handle, 20) == ""
    # Two rows, three rounds of 20 steps: 6 s of queue, then 1 s.
    assert add(driver, 10, 10, timeout_s=4.0) == "RESOURCE_EXHAUSTED"
    refusal = driver.finishes[10]
    assert "would wait" in refusal.error
    assert 2.0 < not_none(refusal.retry_after_s) < 8.0
    assert add(driver, 11, 10, timeout_s=12.0) == ""
    driver.run()
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_retry_delay_becomes_shorter_as_the_queue_does() -> None:
    driver = measured_driver()
    for handle in range(6):
        add(driver, handle, 20)
    delays = []
    for handle in range(10, 13):
        assert add(driver, handle, 20, timeout_s=2.5) == "RESOURCE_EXHAUSTED"
        delays.append(not_none(driver.finishes[handle].retry_after_s))
        for _ in range(15):
            driver.plan()
            driver.now += STEP_S
            driver.apply_result()
    assert delays == sorted(delays, reverse=True)
    assert delays[-1] < delays[0] - 1.0


def test_request_that_takes_too_long_by_itself_is_refused_for_good() -> None:
    driver = measured_driver()
    assert add(driver, 0, 50, timeout_s=4.0) == "DEADLINE_EXCEEDED"
    assert "its deadline is in 4 s" in driver.finishes[0].error
    assert driver.finishes[0].retry_after_s is None
    assert add(driver, 1, 30, timeout_s=4.0) == ""


def test_idle_replica_that_was_slow_serves_again() -> None:
    """Only a request shows that steps are short again; predictions alone would refuse all of them for good."""
    driver = measured_driver()
    pace = driver.scheduler._state.pace
    for _ in range(100):
        pace.observe_step(100 * STEP_S)
    pace.observe_step(STEP_S)
    assert pace.step_s > 10 * STEP_S
    assert add(driver, 0, 30, timeout_s=4.0) == ""
    assert add(driver, 1, 30, timeout_s=4.0) == "RESOURCE_EXHAUSTED"  # one request is enough to measure
    while 0 not in driver.finishes:
        driver.plan()
        driver.now += STEP_S
        driver.apply_result()
    assert len(driver.outputs[0]) == 30
    assert add(driver, 2, 50, timeout_s=4.0) == "DEADLINE_EXCEEDED"  # 5 s at best
    assert add(driver, 3, 20, timeout_s=4.0) == ""


def test_output_that_may_stop_early_is_expected_to_be_as_long_as_others() -> None:
    driver = measured_driver(max_model_len=400, num_blocks=400)
    assert (
        driver.add(0, random_prompt(4), max_tokens=300, timeout_s=4.0) is None
    )  # nothing is known of lengths yet
    for _ in range(20):
        driver.scheduler._state.pace.observe_output(20, has_stopped=True)
    assert driver.add(1, random_prompt(4, 1), max_tokens=300, timeout_s=4.0) is None
    for _ in range(200):
        driver.scheduler._state.pace.observe_output(200, has_stopped=True)
    refusal = not_none(driver.add(2, random_prompt(4, 2), max_tokens=300, timeout_s=4.0))
    assert refusal.grpc_status == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(("num_blocks", "status"), [(42, "RESOURCE_EXHAUSTED"), (400, "")])
def test_request_without_room_for_its_kv_waits(num_blocks: int, status: str) -> None:
    driver = measured_driver(max_num_seqs=8, num_blocks=num_blocks, max_model_len=80)
    for handle in range(6):
        assert add(driver, handle, 70) == ""
    for _ in range(50):
        driver.plan()
        driver.now += STEP_S
        driver.apply_result()
    assert add(driver, 10, 10, timeout_s=3.0) == status


def test_nothing_is_refused_before_a_step_was_measured() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    for handle in range(10):
        assert add(driver, handle, 50, timeout_s=0.01) == ""


def test_waiting_request_that_became_too_late_is_not_started() -> None:
    driver = measured_driver()
    for handle in range(2):
        add(driver, handle, 20)
    assert add(driver, 2, 20, timeout_s=5.0) == ""
    while 2 not in driver.finishes:
        driver.plan()
        driver.now += 1.5 * STEP_S  # longer than expected
        driver.apply_result()
    assert driver.outputs[2] == []
    assert driver.finishes[2].grpc_status == "RESOURCE_EXHAUSTED"
    assert "has waited" in driver.finishes[2].error


def test_standing_queue_is_kept_short() -> None:
    """In a burst a request may wait as long as its deadline allows, under lasting overload only a little."""
    driver = measured_driver()
    for handle in range(4):
        add(driver, handle, 20)
    assert add(driver, 10, 5, timeout_s=10.0) == ""
    driver.now += CONGESTION_S / 2
    assert add(driver, 11, 5, timeout_s=10.0) == ""
    driver.now += 0.6 * CONGESTION_S
    assert add(driver, 12, 5, timeout_s=10.0) == "RESOURCE_EXHAUSTED"
    driver.now += 1.1 * CONGESTION_S  # nothing has come for a while: this is a burst again
    assert add(driver, 13, 5, timeout_s=20.0) == ""


def test_standing_queue_of_one_tenant_does_not_refuse_another() -> None:
    driver = measured_driver(policy="fair")
    for handle in range(8):
        add(driver, handle, 20, tenant="greedy")
    add(driver, 10, 5, timeout_s=20.0, tenant="greedy")
    driver.now += 0.9 * CONGESTION_S
    add(driver, 11, 5, timeout_s=20.0, tenant="greedy")
    driver.now += 0.2 * CONGESTION_S
    assert add(driver, 12, 5, timeout_s=20.0, tenant="greedy") == "RESOURCE_EXHAUSTED"
    assert add(driver, 13, 5, timeout_s=20.0, tenant="light") == ""


@pytest.mark.parametrize(("policy", "is_light_served"), [("fair", True), ("fcfs", False)])
def test_full_queue_makes_room_for_a_tenant_that_has_less(policy: str, is_light_served: bool) -> None:
    driver = measured_driver(policy=policy, max_queue_len=6)
    for handle in range(8):
        add(driver, handle, 5, tenant="greedy")
        driver.plan()
    status = add(driver, 20, 5, tenant="light")
    assert (status == "") is is_light_served
    driver.run()
    assert len(driver.outputs[20]) == (5 if is_light_served else 0)
    refused = [finish for finish in driver.finishes.values() if finish.grpc_status == "RESOURCE_EXHAUSTED"]
    assert len(refused) >= 1
    assert all(finish.retry_after_s is not None for finish in refused)
    driver.scheduler.check_integrity()


def test_migrated_request_is_not_refused() -> None:
    driver = measured_driver(max_queue_len=2)
    for handle in range(4):
        add(driver, handle, 20)
        driver.plan()
    assert driver.add(9, random_prompt(4, 9), generated=[7, 8], max_tokens=20, timeout_s=1.0) is None
