"""Outputs with drafted tokens equal those without, token for token, on 1, 2 and 4 ranks, also with states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_outputs import KnownOutputs
from model_kinds import model_type_of
from ranked_driver import RankedDriver
from state_kinds import STATE_KINDS

from quire.proto.config import SpeculativeConfig
from quire.proto.errors import RankFailed
from quire.proto.step import NewSequence, RowSampling, StepPlan
from quire.worker.rank import loaded_model

NUM_SPECULATIVE_TOKENS = 4
NUM_BLOCKS = 480  # enough for all sequences, with windows and compressors too
# One of each recurrence: short convolution, gated delta, Kimi delta, Mamba 1 and 2, lightning, RG-LRU; and
# compressors and pools, whose entries of rejected tokens are overwritten, and convolutions before attention.
STATES = ["lfm2", "qwen3_next", "kimi_linear", "mamba", "bamba", "minimax", "recurrent_gemma"]
STATES += ["deepseek_v4", "zaya", "qwen4_exp_text", "glm5_next_text"]
SPECULATIVE = SpeculativeConfig("ngram", NUM_SPECULATIVE_TOKENS)
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 7 * seed).tolist() for seed in range(6)]
# One of each kind; the requests run together.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 0, "n": 2},
    {
        "temperature": 1.0,
        "seed": 8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
    {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(0, 380, 7))},
    {"temperature": 0.9, "seed": 9, "bad_words": ((17, 18), (40,)), "logit_bias": {5: 3.0}, "top_k": 30},
    {"temperature": 0.0, "repetition_penalty": 1.2, "allowed_token_ids": tuple(range(3, 300))},
]


# Ranks, kind and what else divides it. Each kind, number of ranks and division is in one quick case at least.
QUICK: list[tuple[Any, ...]] = [
    (1, "llama"), (4, "llama"), (2, "glm_moe_dsa"), (4, "deepseek_v3", "dp"), (2, "glm_moe_dsa", "dp"),
    (2, "llama", "3 stages"), (1, "bamba", "2 stages"), *zip(cycle((1, 2)), STATES),
]  # fmt: skip
SLOW: list[tuple[Any, ...]] = [
    (2, "llama"), (2, "deepseek_v3", "dp"), (1, "llama", "2 stages"), *zip(cycle((2, 1)), STATES),
    (1, "qwen3_next", "2 stages"), (2, "kimi_linear", "3 stages"),
]  # fmt: skip


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def engine(request: pytest.FixtureRequest, make_model: Callable[..., Path], make_engine: Any) -> Any:
    """An engine whose proposer is an KnownOutputs.

    One of the models attends to tokens that its indexer chooses. "dp" is data-parallel attention.
    With pipeline stages the first one has the proposer.
    """
    tp, kind, *more = request.param
    num_stages = next((int(each.split()[0]) for each in more if each.endswith("stages")), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_model, "NgramProposer", KnownOutputs)
        return make_engine(
            make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
            if kind in STATES
            else make_model(kind),
            tp,
            NUM_BLOCKS,
            max_model_len=128,
            block_size=4,
            speculative=SPECULATIVE,
            enable_dp_attention="dp" in more,
            pp=num_stages,
            num_state_slots=24 if kind in STATES else None,
        )


def run(engine: Any, num_blocks: int, speculative: SpeculativeConfig | None, depth: int) -> RankedDriver:
    config = replace(engine.config.with_num_blocks(num_blocks), speculative=speculative)
    engine.divide_blocks(num_blocks)
    driver = RankedDriver(config, engine.step)
    for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        driver.add(10 * index, prompt, max_tokens=30, **settings)
    driver.run(depth)
    driver.empty_ranks()
    return driver


def outputs_of(driver: RankedDriver) -> list[list[int]]:
    """Return prompt and output of all sequences."""
    return [PROMPTS[handle // 10] + output for handle, output in driver.outputs.items()]


def assert_same_logprobs(drafted: RankedDriver, plain: RankedDriver) -> None:
    """Assert that ranks, token ids and log-probabilities are equal.

    Those of small numbers of heads with a state are nearly so: PyTorch computes the last of some numbers otherwise.
    """
    tolerance = 1e-4 if drafted.config.model.has_states else 0.0
    expected = logprobs_of(plain)
    assert drafted.logprobs.keys() == expected.keys()
    for handle, entries in logprobs_of(drafted).items():
        for (chosen, rank, ids, top), (other, *ranking, others) in zip(
            entries, expected[handle], strict=True
        ):
            assert [rank, ids] == ranking
            assert [chosen, *top] == pytest.approx([other, *others], rel=0.0, abs=tolerance)


def logprobs_of(driver: RankedDriver) -> dict[int, list[Any]]:
    """Return the log-probabilities that each sequence asked for: its step may report more for others."""
    widths = {handle: SETTINGS[handle // 10]["logprobs"] for handle in driver.logprobs}
    return {
        handle: [
            (chosen, rank, ids[: widths[handle]], top[: widths[handle]]) for chosen, rank, ids, top in entries
        ]
        for handle, entries in driver.logprobs.items()
    }


@pytest.fixture(scope="module")
def plain(engine: Any) -> RankedDriver:
    driver = run(engine, NUM_BLOCKS, None, 2)
    KnownOutputs.known = outputs_of(driver)
    return driver


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_outputs_and_logprobs_equal_those_without_drafts(
    engine: Any, plain: RankedDriver, depth: int
) -> None:
    drafted = run(engine, NUM_BLOCKS, SPECULATIVE, depth)
    assert drafted.outputs == plain.outputs
    assert drafted.finishes.keys() == plain.finishes.keys()
    for handle, finish in plain.finishes.items():
        assert drafted.finishes[handle].reason == finish.reason
        assert drafted.finishes[handle].num_completion_tokens == finish.num_completion_tokens
    assert_same_logprobs(drafted, plain)
    stats = drafted.scheduler.stats
    assert len(stats.num_accepted) == NUM_SPECULATIVE_TOKENS
    assert 0.3 * stats.num_draft_tokens < sum(stats.num_accepted) < stats.num_draft_tokens
    assert len(drafted.plans) < 0.7 * len(plain.plans)


def test_preempted_sequences_continue_with_same_tokens(engine: Any, plain: RankedDriver) -> None:
    peak = plain.scheduler.stats.peak_used_blocks  # lower with windows
    longest = max(map(len, PROMPTS)) + 30
    least = next(
        each for each in count(2) if engine.config.with_num_blocks(each).max_servable_tokens >= longest
    )
    num_blocks = max(least, peak // 2) if engine.config.parallel.num_kv_partitions == 1 else 20
    drafted = run(engine, num_blocks, SPECULATIVE, 2)
    assert drafted.scheduler.stats.num_preemptions > 0
    assert drafted.scheduler.stats.num_drafts > 0
    assert drafted.outputs == plain.outputs


def test_moved_sequences_continue_with_same_tokens(engine: Any, plain: RankedDriver) -> None:
    config = replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=SPECULATIVE)
    engine.divide_blocks(NUM_BLOCKS)
    driver = RankedDriver(config, engine.step)
    settings = {"max_tokens": 30, **SETTINGS[0]}
    driver.add(0, PROMPTS[0], **settings)
    while len(driver.outputs[0]) < 10:
        driver.step(2)
    driver.scheduler.drain(0.0, 0.0)
    driver.run(2)
    assert driver.moved.keys() == {0}
    driver.empty_ranks()
    successor = RankedDriver(config, engine.step)
    successor.add(0, PROMPTS[0], generated=driver.outputs[0], **settings)
    successor.run(2)
    successor.empty_ranks()
    assert driver.outputs[0] + successor.outputs[0] == plain.outputs[0]


def test_plan_that_drafts_for_an_idle_row_is_refused(
    make_model: Callable[..., Path], make_engine: Any
) -> None:
    engine = make_engine(make_model("llama"), max_model_len=64, speculative=SPECULATIVE)
    tokens, blocks = np.array([5, 6, 7], np.int32), np.array([1], np.int32)
    new = NewSequence(0, 0, tokens, 0, blocks, RowSampling(temperature=0.0))
    tables = engine.runners[0].memory.rows.tables.__class__(8, engine.config.max_blocks_per_seq)
    tables.append(np.zeros(1, np.int32), blocks)
    one = np.ones(1, np.int32)
    plan = StepPlan(
        1,
        1,
        tables.digest,
        new=(new,),
        chunk_rows=0 * one,
        chunk_lens=3 * one,
        draft_rows=0 * one,
        draft_lens=one,
    )
    with pytest.raises(RankFailed, match="the plan drafts for row 0, which does not decode"):
        engine.step(plan)
