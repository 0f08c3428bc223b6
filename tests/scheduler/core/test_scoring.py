"""Each prompt token is scored once and in order, with preemption, prefix hits and aborts."""

from __future__ import annotations

import pytest
from driver import Driver
from fakes import oracle, random_prompt, score_oracle, small_config


@pytest.mark.parametrize("depth", [1, 2])
def test_each_chunk_reports_its_prompt_logprobs(depth: int) -> None:
    driver = Driver(small_config(max_num_batched_tokens=7))
    for handle, length in enumerate((1, 2, 30, 19)):
        driver.add(handle, random_prompt(length, handle), max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    driver.run(depth)
    assert driver.scores == {
        handle: score_oracle(random_prompt(n, handle)) for handle, n in ((1, 2), (2, 30), (3, 19))
    }


def test_cached_prefix_is_recomputed_for_prompt_logprobs() -> None:
    driver = Driver(small_config())
    tokens = random_prompt(30)
    driver.add(0, tokens, max_tokens=3)
    driver.run()
    driver.add(1, tokens, max_tokens=3)
    driver.add(2, tokens, max_tokens=3, prompt_logprobs=0)
    driver.run()
    assert driver.finishes[1].num_cached_tokens >= 28
    assert driver.finishes[2].num_cached_tokens == 0
    assert driver.scores == {2: score_oracle(tokens)}
    assert driver.outputs[1] == driver.outputs[2] == oracle(tokens, 3)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_prompt_resumes_scoring_without_gaps(depth: int, num_host_blocks: int) -> None:
    """Prompt logprobs of a step in flight are dropped with the row: scoring resumes after the last one received."""
    config = small_config(
        num_blocks=17, num_host_blocks=num_host_blocks, swap_blocks_per_s=1e9, policy="priority",
        max_num_batched_tokens=5,
    )  # fmt: skip
    driver = Driver(config)
    low = random_prompt(48, 1)
    driver.add(0, low, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    for _ in range(4):
        driver.plan()
        if depth == 1 or driver.scheduler.num_in_flight == 2:
            driver.apply_result()
    driver.add(1, random_prompt(40, 2), max_tokens=3, priority=1, prompt_logprobs=0, ignore_eos=True)
    driver.run(depth)
    assert driver.scheduler.stats.num_preemptions > 0
    assert driver.scores == {0: score_oracle(low), 1: score_oracle(random_prompt(40, 2))}
    assert driver.outputs[0] == oracle(low, 3, stops=())
    assert driver.finishes[0].timings.recomputed_tokens < 48


def test_parallel_outputs_score_their_prompt_once() -> None:
    driver = Driver(small_config())
    driver.add(5, random_prompt(20), max_tokens=4, n=3, prompt_logprobs=0, ignore_eos=True)
    driver.run()
    assert driver.scores == {5: score_oracle(random_prompt(20))}


def test_prompt_logprobs_of_aborted_requests_are_dropped() -> None:
    driver = Driver(small_config(max_num_batched_tokens=8))
    driver.add(0, random_prompt(30), max_tokens=4, prompt_logprobs=0)
    driver.plan()
    driver.abort(0)
    driver.add(1, random_prompt(6, 3), max_tokens=2, prompt_logprobs=0)
    driver.run()
    assert driver.scores == {1: score_oracle(random_prompt(6, 3))}
