"""A step that fails on a rank costs its requests nothing: the rank is reset, and they continue from their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.proto.errors import RequestQuarantined
from quire.proto.step import StepPlan
from quire.worker.launched_step import LaunchedStep
from quire.worker.runner import ModelRunner

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=0.9, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def llm(make_model: Callable[..., Path]) -> LLM:
    return LLM(str(make_model("llama")), device="cpu", num_kv_blocks=64, audit=True)


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def test_outputs_after_failed_steps_are_those_of_an_undisturbed_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = generate(llm)
    launch, num_launched = ModelRunner.launch, 0

    def fail_sometimes(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal num_launched
        num_launched += 1
        if num_launched in (2, 40):
            raise runner._failure(plan, "RuntimeError: on command")
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_sometimes)
    assert generate(llm) == undisturbed
    assert num_launched > 2


def test_request_whose_steps_fail_is_quarantined(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner.launch

    def fail_on_poison(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        if any(new.token_ids[0] == PROMPTS[1][0] for new in plan.new):
            raise runner._failure(plan, "RuntimeError: on command")
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_on_poison)
    with pytest.raises(RequestQuarantined, match="failed the ranks repeatedly, at last alone"):
        generate(llm)
