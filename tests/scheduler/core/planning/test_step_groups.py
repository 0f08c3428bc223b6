"""Steps of a pipeline: rows take turns, so that all stages are busy, and outputs do not depend on the stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import small_config
from pipeline_times import PipelineTimes
from quick_cases import diagonal

from quire.scheduler.core.planning.step_groups import StepGroups
from quire.scheduler.core.steps.in_flight import InFlightStep, InFlightSteps


def config(num_stages: int, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "num_blocks": 400, "max_model_len": 120, "max_num_seqs": 16, "max_num_batched_tokens": 64,
        "layer_windows": (0,) * max(1, num_stages), "eos": (),
    }  # fmt: skip
    return small_config(num_stages=num_stages, **(defaults | settings))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, 64, random.integers(1, 30)).tolist() for _ in range(count)]


def run(num_stages: int, **settings: Any) -> dict[int, list[int]]:
    driver = Driver(config(num_stages, **settings))
    for handle, prompt in enumerate(prompts(24)):
        driver.add(handle, prompt, max_tokens=40)
    driver.run(depth=driver.config.scheduler.max_steps_in_flight)
    assert driver.scheduler.blocks.num_held_blocks == 0
    return driver.outputs


@pytest.mark.parametrize(("num_stages", "num_blocks"), diagonal([2, 3, 4], [48, 400]))
def test_outputs_do_not_depend_on_the_stages(num_stages: int, num_blocks: int) -> None:
    assert run(num_stages, num_blocks=num_blocks) == run(1)


@pytest.mark.parametrize(("num_stages", "max_num_batched_tokens"), [(2, 64), (4, 64), (2, 512)])
def test_stages_wait_little_at_steady_load(num_stages: int, max_num_batched_tokens: int) -> None:
    """With 512 tokens all sequences start in one step, and end in one: they must be divided nevertheless."""
    driver = Driver(config(num_stages, max_num_batched_tokens=max_num_batched_tokens))
    times = PipelineTimes(driver, transfer_s=0.01)
    for handle, prompt in enumerate(prompts(120)):
        driver.add(handle, prompt, max_tokens=60)
    times.run(20)
    times.count_from_now()
    times.run(200)
    assert driver.scheduler.num_waiting > 0
    assert times.bubble_share < 0.1


def test_rows_in_one_step_would_leave_stages_idle() -> None:
    """The measure finds the bubbles of two stages that get all rows in each step: half of the time."""
    driver = Driver(config(1))
    times = PipelineTimes(driver, num_stages=2)
    for handle in range(16):
        driver.add(handle, [5], max_tokens=100)
    times.run(10)
    times.count_from_now()
    times.run(60)
    assert times.bubble_share > 0.4


def test_one_sequence_goes_on_without_a_wait_for_the_scheduler() -> None:
    driver = Driver(config(2))
    driver.add(0, [5, 6], max_tokens=30)
    driver.plan()
    second, third = driver.plan(), driver.plan()
    assert second is not None
    assert third is None  # the row is in two steps


def steps_with(*rows: list[int]) -> InFlightSteps:
    in_flight = InFlightSteps()
    for number, own in enumerate(rows, 1):
        in_flight.add(InFlightStep(number, np.array(own, np.intp), [], len(own), 0.0))
    return in_flight


def choose(groups: StepGroups, count: int, in_flight: InFlightSteps, *, waits: bool = True) -> list[int]:
    return groups.choose(np.arange(count), in_flight, waits_for_rows=waits).tolist()


def test_rows_are_not_in_two_of_as_many_steps_as_stages() -> None:
    groups = StepGroups(8, 2)
    groups.note(np.array([0, 1]), 1)
    assert choose(groups, 4, steps_with([0, 1])) == [2, 3]
    assert choose(groups, 4, steps_with([0, 1], [2, 3])) == [0, 1]


def test_rows_that_waited_longest_come_first() -> None:
    groups = StepGroups(8, 2)
    groups.note(np.array([0, 1]), 1)
    assert choose(groups, 4, steps_with([7])) == [2, 3]
    assert choose(groups, 4, steps_with([7])) == [0, 1]


def test_the_step_after_none_has_a_part_of_the_rows() -> None:
    groups = StepGroups(8, 2)
    groups.note(np.array([0, 1]), 1)
    assert choose(groups, 4, steps_with(), waits=False) == [2, 3]


def test_rows_whose_token_is_awaited_run_only_if_there_is_nothing_else() -> None:
    groups = StepGroups(8, 2)
    in_flight = steps_with([0])
    assert choose(groups, 1, in_flight, waits=False) == []
    assert choose(groups, 1, in_flight) == [0]
    assert choose(groups, 1, steps_with([0], [0])) == []


def test_with_one_stage_each_step_has_all_rows() -> None:
    assert choose(StepGroups(8, 1), 5, steps_with([0, 1, 2, 3, 4])) == [0, 1, 2, 3, 4]
