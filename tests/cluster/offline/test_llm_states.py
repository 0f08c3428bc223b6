"""LLM with models whose layers keep states: default memory, conversations, structured outputs, preemption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import model_type_of
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cluster.offline.in_process import InProcessEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# The first has no layer with keys and values, and the last has latents.
KINDS = ["mamba", "lfm2", "kimi_linear"]


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda kind: make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])


def open_llm(folder: Path, **options: Any) -> LLM:
    options = {"kv_cache_memory": 8 << 20, "max_num_seqs": 4, "block_size": 4, "max_model_len": 128} | options
    return LLM(str(folder), device="cpu", dtype="float32", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_conversation_starts_each_turn_from_a_snapshot(kind: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    reference = Reference(folder)
    (prompt, question), llm = prompts_of([21, 7], seed=1), open_llm(folder)
    with llm:
        assert isinstance(llm._engine, InProcessEngine)
        blocks = llm._engine.scheduler.blocks
        assert blocks.num_blocks >= 4 * 32  # as many as the longest sequences need
        (first,) = llm.generate([prompt], GREEDY)
        turn = prompt + list(first.outputs[0].token_ids)
        (second,) = llm.generate([turn + question], GREEDY)
        assert second.num_cached_tokens == len(turn) - 1
        for start, result in ((prompt, first), (turn + question, second)):
            reference.check_greedy(start, result.outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["mamba", "kimi_linear"])
def test_states_in_bfloat16_serve_turns_of_a_conversation(kind: str, folders: Callable[[str], Path]) -> None:
    """Outputs need not be those of float32: each step rounds the states."""
    prompt, question = prompts_of([21, 7], seed=1)
    with open_llm(folders(kind), mamba_ssm_cache_dtype="bfloat16") as llm:
        (first,) = llm.generate([prompt], GREEDY)
        turn = prompt + list(first.outputs[0].token_ids)
        (second,) = llm.generate([turn + question], GREEDY)
        assert isinstance(llm._engine, InProcessEngine)
        states = llm._engine._group._runner.memory.kv.cache.states
    assert second.num_cached_tokens == len(turn) - 1
    assert {states[0][1].dtype, states[-1][-1].dtype} == {torch.bfloat16}
    assert states[0][0].dtype == torch.float32  # of the convolution, as the model's


def test_structured_output_of_a_model_with_states(folders: Callable[[str], Path]) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["whale", "ship"]}, "is_old": {"type": "boolean"}},
        "required": ["name", "is_old"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, n=2, structured_outputs=StructuredOutputsParams(json=schema)
    )
    with open_llm(folders("lfm2"), disable_any_whitespace=True) as llm:
        (result,) = llm.generate(["It was"], params)
    for output in result.outputs:
        assert set(json.loads(output.text)) == {"name", "is_old"}


def test_outputs_of_few_blocks_and_slots_equal_transformers(folders: Callable[[str], Path]) -> None:
    folder = folders("lfm2")
    reference, prompts = Reference(folder), prompts_of([9, 30, 17, 3, 26], seed=2)
    with open_llm(folder, num_kv_blocks=20, num_state_slots=4, max_num_batched_tokens=16) as llm:
        results = llm.generate(prompts, GREEDY)
        assert isinstance(llm._engine, InProcessEngine)
        assert llm._engine.scheduler.stats.num_preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        reference.check_greedy(prompt, result.outputs[0].token_ids)
