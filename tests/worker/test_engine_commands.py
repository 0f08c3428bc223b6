"""Other weights and sleep on real ranks, under requests that run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from quire.proto.engine_command import Action, EngineCommand

PROMPTS = prompts_of([7, 19], seed=6)
CALLER = (b"", 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_running_requests_continue_with_the_new_weights(
    make_model: Callable[..., Path], make_engine: Any, tp: int
) -> None:
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine = make_engine(first, tp, num_blocks=32, block_size=4, max_model_len=60)
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, prompt, max_tokens=20, ignore_eos=True)
    for _ in range(8):
        driver.step(depth=2)
    for action in (Action.UPDATE_WEIGHTS, Action.SLEEP, Action.WAKE_UP):
        driver.scheduler.control.order(EngineCommand(action, path=str(second), version="v"), CALLER)
    while driver.scheduler.num_in_flight:
        driver.apply_result()
    lengths = [len(driver.outputs[handle]) for handle in range(2)]
    driver.run(depth=2)
    assert driver.scheduler.control.take_answers() == [(CALLER, "")] * 3
    for handle, prompt in enumerate(PROMPTS):
        output, length = driver.outputs[handle], lengths[handle]
        assert 0 < length < len(output) == 20
        Reference(first).check_greedy(prompt, output[:length])
        Reference(second).check_greedy(prompt + output[:length], output[length:])
        assert driver.finishes[handle].weights_version == "v"


def test_ranks_refuse_weights_together(make_model: Callable[..., Path], make_engine: Any) -> None:
    folder = make_model("llama", seed=1)
    engine = make_engine(folder, 2, num_blocks=32, block_size=4)
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    missing = EngineCommand(Action.UPDATE_WEIGHTS, path=str(folder / "missing"), version="v")
    driver.add(0, PROMPTS[0], max_tokens=8, ignore_eos=True)
    for _ in range(4):
        driver.step()
    driver.scheduler.control.order(missing, CALLER)
    driver.run()
    ((_, error),) = driver.scheduler.control.take_answers()
    assert "missing" in error
    Reference(folder).check_greedy(PROMPTS[0], driver.outputs[0])
