"""Commands between steps: what running and waiting requests see, and rebuilt ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config

from quire.proto.engine_command import Action, EngineCommand, PauseMode, SleepTag
from quire.proto.stream import FinishReason
from quire.scheduler.core.control.engine_control import MAX_ORDERS

CALLER = (b"gateway", 7)
UPDATE = EngineCommand(Action.UPDATE_WEIGHTS, path="weights", version="v1")
SLEEP, WAKE_UP = EngineCommand(Action.SLEEP), EngineCommand(Action.WAKE_UP)
WAKE_WEIGHTS, WAKE_KV = (EngineCommand(Action.WAKE_UP, tags=(tag,)) for tag in SleepTag)
PAUSE, RESUME = EngineCommand(Action.PAUSE), EngineCommand(Action.RESUME)
PROMPTS = [random_prompt(9, seed=seed) for seed in range(3)]


@pytest.fixture
def driver() -> Driver:
    """A replica with two requests that run and one that waits."""
    driver = Driver(small_config(eos=(), max_num_seqs=2, num_blocks=64))
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, prompt, max_tokens=10)
    for _ in range(6):
        driver.step(depth=2)
    assert [len(driver.outputs[handle]) > 0 for handle in range(3)] == [True, True, False]
    return driver


def order(driver: Driver, command: EngineCommand) -> None:
    driver.scheduler.control.order(command, CALLER)


def outcomes(driver: Driver) -> list[str]:
    return [error for caller, error in driver.scheduler.control.take_replies() if caller == CALLER]


def check_outputs(driver: Driver) -> None:
    for handle, prompt in enumerate(PROMPTS):
        assert driver.outputs[handle] == oracle(prompt, 10, stops=())
        assert driver.finishes[handle].reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.WAIT])
def test_update_preempts_or_waits_for_running_requests(driver: Driver, mode: PauseMode) -> None:
    order(driver, EngineCommand(Action.UPDATE_WEIGHTS, mode, path="weights", version="v1"))
    driver.run(depth=2)
    assert outcomes(driver) == [""]
    assert [command.path for command in driver.group.commands] == ["weights"]
    check_outputs(driver)
    versions = [driver.finishes[handle].weights_version for handle in range(3)]
    assert versions == (["v1"] * 3 if mode is PauseMode.KEEP else ["", "", "v1"])
    recomputed = [driver.finishes[handle].timings.recomputed_tokens > 0 for handle in range(3)]
    assert recomputed == [mode is PauseMode.KEEP] * 2 + [False]


def test_update_aborts_all_requests_if_it_shall(driver: Driver) -> None:
    order(driver, EngineCommand(Action.UPDATE_WEIGHTS, PauseMode.ABORT, path="weights", version="v1"))
    driver.run(depth=2)
    assert outcomes(driver) == [""]
    assert {finish.grpc_status for finish in driver.finishes.values()} == {"CANCELLED"}
    assert len(driver.finishes) == 3
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_request_that_expires_ends_before_the_command_is_carried_out(driver: Driver) -> None:
    driver.add(3, PROMPTS[0], timeout_s=5.0)
    while driver.scheduler.num_in_flight:
        driver.apply_result()
    order(driver, UPDATE)
    driver.now += 6.0
    plan = driver.plan()
    assert plan is not None
    assert plan.command is not None
    driver.record(driver.scheduler.take_outgoing())
    assert driver.finishes[3].grpc_status == "DEADLINE_EXCEEDED"


def test_refused_update_keeps_the_version(driver: Driver) -> None:
    driver.group.command_error = "no such file"
    order(driver, UPDATE)
    driver.run(depth=2)
    assert outcomes(driver) == ["no such file"]
    check_outputs(driver)
    assert {finish.weights_version for finish in driver.finishes.values()} == {""}


def test_prefixes_of_earlier_weights_are_not_found() -> None:
    driver = Driver(small_config(num_blocks=64))
    for handle, command in enumerate((None, None, UPDATE, None)):
        if command is not None:
            order(driver, command)
        driver.add(handle, PROMPTS[0], max_tokens=1)
        driver.run()
    cached = [driver.finishes[handle].num_cached_tokens for handle in range(4)]
    assert [count > 0 for count in cached] == [False, True, False, True]


def test_paused_engine_plans_nothing_until_it_resumes(driver: Driver) -> None:
    order(driver, PAUSE)
    while driver.step():
        pass
    assert outcomes(driver) == [""]
    assert driver.plan() is None
    assert driver.scheduler.num_running == 2
    order(driver, RESUME)
    driver.run()
    assert outcomes(driver) == [""]
    check_outputs(driver)
    assert not driver.group.commands
    assert not any(finish.timings.recomputed_tokens for finish in driver.finishes.values())


def test_sleeping_engine_keeps_requests_and_refuses_new_ones(driver: Driver) -> None:
    order(driver, SLEEP)
    while driver.step():
        pass
    rejection = driver.add(9, PROMPTS[0], max_tokens=1)
    assert rejection is not None
    assert rejection.grpc_status == "UNAVAILABLE"
    assert "sleeps" in rejection.error
    del driver.finishes[9]
    order(driver, WAKE_UP)
    driver.run()
    assert outcomes(driver) == ["", ""]
    check_outputs(driver)


def test_discarded_weights_must_be_named_before_waking(driver: Driver) -> None:
    order(driver, EngineCommand(Action.SLEEP, level=2))
    while driver.step():
        pass
    order(driver, WAKE_UP)
    order(driver, UPDATE)
    while driver.step():
        pass
    order(driver, WAKE_UP)
    driver.run()
    refused, *others = sorted(outcomes(driver), reverse=True)
    assert "level 2" in refused
    assert others == ["", "", ""]
    check_outputs(driver)


@pytest.mark.parametrize("parts", [(WAKE_WEIGHTS, WAKE_KV), (WAKE_KV, WAKE_WEIGHTS)])
def test_engine_that_wakes_in_parts_refuses_requests_until_all_is_awake(
    driver: Driver, parts: tuple[EngineCommand, ...]
) -> None:
    control = driver.scheduler.control
    for command in (SLEEP, parts[0], parts[0]):
        order(driver, command)
        while driver.step():
            pass
        assert control.is_asleep
        assert control.refusal() is not None
    order(driver, parts[1])
    driver.run()
    assert not control.is_asleep
    assert outcomes(driver) == [""] * 4
    check_outputs(driver)


@pytest.mark.parametrize("first", [WAKE_WEIGHTS, WAKE_KV])
def test_discarded_weights_are_needed_only_when_all_is_awake(driver: Driver, first: EngineCommand) -> None:
    discard = EngineCommand(Action.SLEEP, level=2)
    for command in (discard, first, WAKE_UP, UPDATE, discard, UPDATE, SLEEP, WAKE_UP):
        order(driver, command)
    driver.run()
    refused, *others = sorted(outcomes(driver), reverse=True)
    assert "level 2" in refused
    assert others == [""] * 7
    check_outputs(driver)


def test_rebuilt_ranks_wake_as_far_as_the_others(driver: Driver) -> None:
    for command in (EngineCommand(Action.SLEEP, level=2), UPDATE, WAKE_WEIGHTS):
        order(driver, command)
    while driver.step():
        pass
    driver.lose_ranks()
    while driver.step():
        pass
    commands = [(command.action, command.level, command.tags) for command in driver.group.commands[3:]]
    asleep = EngineCommand(Action.SLEEP)  # at level 1: the weights of the update are kept
    assert commands == [(each.action, each.level, each.tags) for each in (UPDATE, asleep, WAKE_WEIGHTS)]
    order(driver, WAKE_KV)
    driver.run()
    assert outcomes(driver) == [""] * 4
    check_outputs(driver)


def test_rebuilt_ranks_get_the_weights_and_the_sleep_of_the_others(driver: Driver) -> None:
    order(driver, UPDATE)
    order(driver, SLEEP)
    while driver.step():
        pass
    driver.lose_ranks()
    while driver.step():
        pass
    actions = [command.action for command in driver.group.commands]
    assert actions == [Action.UPDATE_WEIGHTS, Action.SLEEP] * 2
    order(driver, WAKE_UP)
    driver.run()
    assert outcomes(driver) == ["", "", ""]
    check_outputs(driver)


def test_command_of_ranks_that_fail_in_it_is_carried_out_by_the_next(driver: Driver) -> None:
    order(driver, UPDATE)
    while driver.scheduler.num_in_flight:
        driver.apply_result()
    driver.plan()
    driver.lose_ranks()
    driver.run()
    assert outcomes(driver) == [""]
    check_outputs(driver)


def test_commands_that_wait_are_bounded(driver: Driver) -> None:
    for _ in range(MAX_ORDERS + 1):
        order(driver, PAUSE)
    assert outcomes(driver) == [f"{MAX_ORDERS} commands wait already"]


def test_stamped_update_is_carried_out_once_and_never_replaces_a_later_one(driver: Driver) -> None:
    control = driver.scheduler.control
    first, second = (replace(UPDATE, version=each, timestamp=each) for each in ("1", "2"))
    for _ in range(3):
        control.order(second, None)  # of gateways whose replicas lack it
    order(driver, second)
    driver.run(depth=2)
    order(driver, second)
    order(driver, first)
    assert outcomes(driver) == ["", "", "weights '2' were ordered later, and are in use"]
    assert [command.version for command in driver.group.commands] == ["2", "2"]
    assert control.update == second
    check_outputs(driver)


def test_failed_update_without_a_caller_is_reported_for_the_log(driver: Driver) -> None:
    driver.group.command_error = "no such file"
    driver.scheduler.control.order(replace(UPDATE, timestamp="1"), None)
    driver.run(depth=2)
    assert driver.scheduler.control.take_problems() == ["no such file"]
    assert driver.scheduler.control.take_problems() == []
