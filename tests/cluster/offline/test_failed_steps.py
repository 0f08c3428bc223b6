"""A step that fails on a rank costs its requests nothing: the rank is reset, and they continue from their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.proto.errors import RankFailed, RequestQuarantined
from quire.proto.step import StepPlan, StepResult
from quire.scheduler.service import recovery
from quire.worker.rank.runner import ModelRunner
from quire.worker.rank.step_executor import LaunchedStep, StepExecutor
from quire.worker.step.batch import Batch

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=0.9, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def llm(make_model: Callable[..., Path]) -> LLM:
    return LLM(str(make_model("llama")), device="cpu", num_kv_blocks=64, audit=True)


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "error", [RuntimeError("on command"), MemoryError(), torch.OutOfMemoryError("device")]
)
def test_outputs_after_failed_steps_are_those_of_an_undisturbed_run(
    error: Exception, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = generate(llm)
    launch, num_computed = StepExecutor.launch, 0

    def fail_sometimes(executor: StepExecutor, batch: Batch, result: StepResult) -> LaunchedStep:
        nonlocal num_computed
        num_computed += 1
        if num_computed in (2, 40):
            raise error
        return launch(executor, batch, result)

    monkeypatch.setattr(StepExecutor, "launch", fail_sometimes)
    assert generate(llm) == undisturbed
    assert num_computed > 2


@pytest.fixture(scope="module")
def swapping_llm(make_model: Callable[..., Path]) -> Iterator[LLM]:
    settings = {"block_size": 4, "num_kv_blocks": 24, "num_host_kv_blocks": 64, "max_num_seqs": 8}
    with LLM(str(make_model("llama")), device="cpu", audit=True, **settings) as llm:
        llm._engine.scheduler._state.costs.swap_blocks_per_s = 1e9  # type: ignore[attr-defined]
        yield llm


def launch_and_lose_writes(runner: ModelRunner, plan: StepPlan) -> None:
    """Execute a step, and then overwrite with NaN what it wrote into KV blocks, on the device and on the host."""
    parts = [*runner.memory.kv.cache._parts, *runner.memory.kv.cache._host_parts]
    before = [part.clone() for part in parts]
    runner.launch(plan).result()
    for part, old in zip(parts, before, strict=True):
        part[part != old] = torch.nan


@pytest.mark.parametrize("failing_step", [3, 12, 20, 30])
def test_kv_of_other_steps_is_used_after_a_failed_one(
    swapping_llm: LLM, failing_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = swapping_llm._engine.scheduler  # type: ignore[attr-defined]
    prompts = [[seed, *range(5, 14)] for seed in (failing_step, failing_step + 1, failing_step + 2, 63)]
    params = replace(PARAMS, max_tokens=24)
    launch, num_launched = ModelRunner.launch, 0

    def fail_once(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal num_launched
        num_launched += 1
        if num_launched == failing_step:
            with monkeypatch.context() as patch:
                patch.setattr(ModelRunner, "launch", launch)
                launch_and_lose_writes(runner, plan)
            raise RankFailed(0, "RuntimeError: on command", plan.step_id, is_step_error=True)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_once)
    num_kept, num_preemptions = scheduler.stats.num_retained_tokens, scheduler.stats.num_preemptions
    disturbed = swapping_llm.generate(prompts, params)
    assert scheduler.stats.num_preemptions > num_preemptions
    assert scheduler.stats.num_retained_tokens > num_kept
    assert scheduler.blocks.num_held_blocks == scheduler.blocks.host.num_held == 0
    scheduler.blocks.flush_cache()
    undisturbed = swapping_llm.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in disturbed] == [
        each.outputs[0].token_ids for each in undisturbed
    ]


def test_request_whose_steps_fail_is_quarantined(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner.launch

    def fail_on_poison(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        if any(new.token_ids[0] == PROMPTS[1][0] for new in plan.new):
            raise RankFailed(0, "RuntimeError: on command", plan.step_id, is_step_error=True)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_on_poison)
    with pytest.raises(RequestQuarantined, match="failed the ranks repeatedly, at last alone"):
        generate(llm)


def test_process_that_lost_its_device_computes_no_further_steps(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "FIRST_DELAY_S", 0.0)
    num_launched = 0

    def fail(executor: StepExecutor, batch: Batch, result: StepResult) -> LaunchedStep:
        nonlocal num_launched
        num_launched += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(StepExecutor, "launch", fail)
    with (
        LLM(str(make_model("llama")), device="cpu", num_kv_blocks=64) as llm,
        pytest.raises(RankFailed, match="can use its GPU no more"),
    ):
        generate(llm)
    assert num_launched == 1
