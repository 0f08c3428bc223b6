"""LLM on one rank: tokens equal to those of transformers, stop conditions, interrupts, and imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import PROGRAM_TIMEOUT_S
from narrowing import not_none
from reference import Reference

from quire import LLM, SamplingParams
from quire.cluster.os_utils.processes import ProcessTree
from quire.cluster.text.requests.outputs import most_likely
from quire.proto.errors import ConfigError
from quire.proto.step import StepPlan

PROMPTS = [
    "The quick brown fox",
    "It was",
    "A gathering of folded pages is called a quire; many quires make a book.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_greedy_tokens_equal_transformers(llm: LLM, model_dir: Path) -> None:
    results = llm.generate(PROMPTS, GREEDY)
    prompts = [not_none(result.prompt_token_ids) for result in results]
    reference = Reference(model_dir)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.outputs[0].token_ids) == 20
        reference.check_greedy(prompt, result.outputs[0].token_ids)
    assert [result.prompt for result in results] == PROMPTS
    assert all(result.outputs[0].finish_reason == "length" for result in results)
    assert llm.generate(prompts[0], GREEDY)[0].outputs == results[0].outputs


def test_prompts_may_be_text_ids_or_arrays(llm: LLM) -> None:
    ids = not_none(llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids)
    forms: list[Any] = [PROMPTS[0], [PROMPTS[0]], ids, [ids], tuple(ids), np.array(ids), [np.array(ids)]]
    for prompts in forms:
        (result,) = llm.generate(prompts, GREEDY)
        assert result.prompt_token_ids == ids
        assert result.outputs[0].index == 0
    assert llm.generate([], GREEDY) == []
    prompts_of_both_kinds: list[str | list[int]] = [PROMPTS[1], ids]
    mixed = llm.generate(prompts_of_both_kinds, [GREEDY, SamplingParams(max_tokens=1)])
    assert [result.prompt for result in mixed] == [PROMPTS[1], None]
    assert [len(result.outputs[0].token_ids) for result in mixed] == [20, 1]


def test_stop_string_truncates_the_text_and_ends_the_sequence(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stop = whole.text[8:11]
    params = SamplingParams(temperature=0.0, max_tokens=300, stop=(stop,))
    cut = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_stop_token_is_the_last_token_and_not_in_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    stop = whole.token_ids[5]
    end = whole.token_ids.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=300, stop_token_ids=(stop,))
    cut = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (whole.token_ids[:end], "stop", stop)
    assert whole.text.startswith(cut.text)
    assert len(cut.text) < len(whole.text)


def test_logprobs_equal_those_of_transformers(llm: LLM, model_dir: Path) -> None:
    import torch

    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    (result,) = llm.generate(PROMPTS[0], params)
    tokens, entries = result.outputs[0].token_ids, result.outputs[0].logprobs
    assert entries is not None
    assert len(entries) == len(tokens)
    with torch.no_grad():
        logits = (
            Reference(model_dir).model(torch.tensor([not_none(result.prompt_token_ids) + tokens])).logits[0]
        )
    expected = torch.log_softmax(logits[len(not_none(result.prompt_token_ids)) - 1 : -1], dim=-1)
    for row, token_id, entry in zip(expected, tokens, entries, strict=True):
        assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert next(iter(entry)) == token_id
        assert {top_id for top_id, _ in most_likely(entry, 2)} == set(row.topk(2).indices.tolist())
        assert entry[token_id].rank == 1 + int((row > row[token_id]).sum())
        assert all(isinstance(logprob.decoded_token, str) for logprob in entry.values())
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].logprobs is None


def test_each_request_gets_its_own_number_of_logprobs(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=4, seed=1, logprobs=count, ignore_eos=True) for count in (0, 5, 1)]
    none, many, one = (result.outputs[0].logprobs for result in llm.generate(PROMPTS, params))
    assert none is not None
    assert many is not None
    assert one is not None
    assert all(len(entry) == 1 for entry in none)
    assert all(len(entry) in (5, 6) for entry in many)
    assert all(len(entry) in (1, 2) for entry in one)


def test_seed_gives_the_same_tokens_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, seed=42, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], seeded)[0].outputs[0].token_ids
    others = [SamplingParams(max_tokens=30, ignore_eos=True)] * 3
    crowded = llm.generate([*PROMPTS, PROMPTS[0]], [*others, seeded])[-1].outputs[0].token_ids
    assert crowded == alone
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=43))[0].outputs[0].token_ids != alone


def test_unseeded_runs_are_reproducible(model_dir: Path) -> None:
    def answers(seed: int) -> list[list[int]]:
        with LLM(str(model_dir), device="cpu", num_kv_blocks=32, seed=seed) as llm:
            return [
                result.outputs[0].token_ids for result in llm.generate(PROMPTS, SamplingParams(max_tokens=10))
            ]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_interrupt_aborts_the_batch(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
    schedule, num_steps = scheduler.schedule, 0

    def interrupted(now: float) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return schedule(now)

    scheduler.schedule = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    finally:
        scheduler.schedule = schedule
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
    again = llm.generate(PROMPTS, GREEDY)
    assert [result.outputs for result in again] == [result.outputs for result in expected]


def test_interrupt_at_the_first_step_aborts_the_batch(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the steps' thread runs and the caller does not wait for it yet."""
    has_begun, start = threading.Event(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert has_begun.wait(60)
        raise KeyboardInterrupt

    with LLM(str(model_dir), device="cpu", num_kv_blocks=32) as fresh:
        scheduler = fresh._engine.scheduler  # type: ignore[attr-defined]
        schedule = scheduler.schedule

        def begin(now: float) -> Any:
            has_begun.set()
            return schedule(now)

        scheduler.schedule = begin
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fresh.generate(PROMPTS, GREEDY)
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert len(fresh.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_failed_step_ends_the_call_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    engine: Any = llm._engine

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._group, "broadcast", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(PROMPTS, GREEDY)
    assert not engine.scheduler.has_work
    again = llm.generate(PROMPTS, GREEDY)
    assert [result.outputs for result in again] == [result.outputs for result in expected]


def test_more_prompts_than_the_kv_memory_holds_at_once(model_dir: Path) -> None:
    with LLM(str(model_dir), device="cpu", num_kv_blocks=8, max_num_seqs=8) as small:
        results = small.generate([PROMPTS[0]] * 20, GREEDY)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1


def test_missing_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        LLM(str(tmp_path / "nowhere"))


@pytest.mark.cluster
def test_two_ranks_generate_the_tokens_of_one_and_leave_no_process(model_dir: Path) -> None:
    """In a process of its own, since Ray has one instance per process; closed only by the interpreter's exit."""
    program = (
        "import sys; from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(model_dir)!r}, tensor_parallel_size=2, device='cpu', num_kv_blocks=32)\n"
        f"params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)\n"
        f"for result in llm.generate({PROMPTS!r}, params): print(result.outputs[0].token_ids)\n"
        "print(len(llm.generate('It was', params)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with LLM(str(model_dir), device="cpu", num_kv_blocks=32) as alone:
        expected = [str(result.outputs[0].token_ids) for result in alone.generate(PROMPTS, GREEDY)]
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        output = [process.stdout.readline().rstrip() for _ in range(len(expected) + 1)]
        tree = ProcessTree([process.pid])
        assert len(tree.wait(0.0)) > 3, "Ray's processes and two ranks"
        process.communicate(timeout=PROGRAM_TIMEOUT_S)
        left = tree.wait(60.0)
        tree.kill()
        tree.close()
    finally:
        process.kill()
    assert process.returncode == 0
    assert output == [*expected, "1"]
    assert left == []
