"""Models whose layers keep states, as the scheduler runs them: greedy tokens equal transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import model_type_of
from quick_cases import slow_except
from ranked_driver import RankedDriver, _Ranks
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from quire.proto.config import EngineConfig
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.service.worker_group import Rebuilt

# Of each layer kind; some have windows or latents too, and two have no attention.
KINDS = ["lfm2", "qwen3_next", "bamba", "nemotron_h", "falcon_h1", "lfm3", "mamba", "mamba2", "jamba"]
KINDS += ["kimi_linear", "bailing_hybrid", "minimax", "recurrent_gemma", "zamba", "deepseek_v4", "zaya"]
KINDS += ["glm5_next_text", "qwen4_exp_text", "qwen4_exp_text-two-tables"]
QUICK = ["lfm2", "qwen3_next", "lfm3", "kimi_linear", "mamba", "zamba", "deepseek_v4", "zaya"]
QUICK += ["qwen4_exp_text", "glm5_next_text"]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def references(make_model: Any) -> Callable[[str], tuple[Path, Reference]]:
    """`references(kind) -> folder, Reference`; cached."""
    made: dict[str, tuple[Path, Reference]] = {}

    def reference(kind: str) -> tuple[Path, Reference]:
        if kind not in made:
            folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
            made[kind] = folder, Reference(folder)
        return made[kind]

    return reference


@pytest.fixture(scope="module")
def drivers(references: Any, make_engine: Any) -> Callable[..., RankedDriver]:
    """`drivers(kind, tp, budget, **cache) -> RankedDriver` on ranks that are made once per kind."""
    engines: dict[tuple[str, int], Any] = {}

    def driver(kind: str, tp: int = 1, budget: int = 12, **cache: Any) -> RankedDriver:
        if (kind, tp) not in engines:
            engines[kind, tp] = make_engine(
                references(kind)[0], tp, block_size=BLOCK_SIZE, max_num_seqs=4, num_state_slots=24,
                num_host_state_slots=6, num_host_blocks=60,
            )  # fmt: skip
        engine = engines[kind, tp]
        for runner in engine.runners:  # what others have left in the slots has no effect
            for layer in [*runner.memory.kv.cache.states, *runner.memory.kv.cache._host_states]:
                for tensor in layer:
                    tensor.fill_(torch.nan)
        config = replace(
            engine.config,
            scheduler=replace(engine.config.scheduler, max_num_batched_tokens=budget),
            cache=replace(engine.config.cache, **({"num_kv_blocks": engine.num_blocks} | cache)),
        )
        return StateDriver(config, engine)

    return driver


class _Group(_Ranks):
    """Ranks that join anew after a failure of a step, with their memory."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.step)
        self._engine = engine
        self.kept, self.has_new_ranks = KvTiers.ALL, False

    def rebuild(self, epoch: int) -> Rebuilt:
        self._plans.clear()
        for runner in self._engine.runners:
            runner.reset(has_new_ranks=False)
        return Rebuilt(self.has_new_ranks, self.kept)


class StateDriver(RankedDriver):
    """A RankedDriver whose ranks can fail."""

    def __init__(self, config: EngineConfig, engine: Any) -> None:
        super().__init__(config, engine.step)
        self.group = _Group(engine)  # type: ignore[assignment]


def add(driver: RankedDriver, prompts: dict[int, list[int]], num_tokens: int, **settings: Any) -> None:
    for handle, prompt in prompts.items():
        driver.add(handle, prompt, max_tokens=num_tokens, ignore_eos=True, **settings)


def scarce_blocks(config: EngineConfig, prompts: dict[int, list[int]], num_tokens: int) -> int:
    """Return as many blocks as the longest of the sequences needs, so that a window's too are few for four."""
    longest = max(map(len, prompts.values())) + num_tokens
    return next(each for each in count(2) if config.with_num_blocks(each).max_servable_tokens >= longest)


def cases(*tps: int) -> list[Any]:
    """Return each kind on one rank and on two, marked slow except for QUICK kinds on `tps` in turns."""
    return slow_except(list(zip(QUICK, cycle(tps))), product(KINDS, (1, 2)))


@pytest.mark.parametrize(("kind", "tp"), cases(1, 2))
def test_prefix_hits_equal_transformers(
    kind: str, tp: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    """Of the first prompt the end of its output is found, and then the place where later prompts branch off."""
    _, reference = references(kind)
    driver = drivers(kind, tp)
    (prefix,), tails = prompts_of([29], seed=1), prompts_of([6, 3, 9], seed=2)
    add(driver, {0: prefix}, 10)
    driver.run(depth=2)
    first_turn = prefix + driver.outputs[0]
    add(driver, {1: first_turn + tails[0]}, 10)
    driver.run(depth=2)
    # All that was computed of the first turn: the last token is not.
    assert driver.scheduler.blocks.num_hit_tokens == len(first_turn) - 1
    branches = {2 + index: prefix[:21] + tail for index, tail in enumerate(tails)}
    for handle, prompt in branches.items():
        add(driver, {handle: prompt}, 10)
        driver.run(depth=2)
    # The second request with the prefix of 20 tokens saves the state for the third.
    assert driver.scheduler.blocks.num_hit_tokens == len(first_turn) - 1 + 2 * 20
    driver.finish({0: prefix, 1: first_turn + tails[0], **branches}, reference, 10)


@pytest.mark.parametrize(("kind", "tp"), cases(2, 1))
def test_preemptions_equal_transformers(
    kind: str, tp: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    _, reference = references(kind)
    prompts = dict(enumerate(prompts_of([17, 9, 30, 5, 21, 26], seed=3)))
    driver = drivers(kind, tp, num_kv_blocks=scarce_blocks(drivers(kind, tp).config, prompts, 14))
    add(driver, prompts, 14)
    driver.finish(prompts, reference, 14)
    assert driver.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize(("kind", "tp"), cases(1, 2))
def test_preempted_states_come_back_from_host_memory(
    kind: str, tp: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    _, reference = references(kind)
    prompts = dict(enumerate(prompts_of([17, 9, 30, 5, 21, 26], seed=3)))
    driver = drivers(kind, tp, num_kv_blocks=scarce_blocks(drivers(kind, tp).config, prompts, 14))
    costs = driver.scheduler._state.costs
    costs.swap_blocks_per_s = costs.swap_states_per_s = 1e9  # swap whenever there is host memory
    add(driver, prompts, 14)
    driver.finish(prompts, reference, 14)
    assert sum(len(plan.state_swap_out) for plan in driver.plans) > 0
    assert sum(len(plan.state_swap_in) for plan in driver.plans) > 0


@pytest.mark.parametrize(("kind", "tp"), cases(2, 1))
def test_snapshots_come_back_from_host_memory(
    kind: str, tp: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    _, reference = references(kind)
    driver = drivers(kind, tp, num_state_slots=3)
    prompts = dict(enumerate(prompts_of([22, 25, 19, 27], seed=11)))
    for handle, prompt in prompts.items():
        add(driver, {handle: prompt}, 6)
        driver.run(depth=2)
    assert driver.scheduler.blocks.state_slots.num_host_snapshots > 0
    further = {4 + handle: prompt + driver.outputs[handle] + [7, 8] for handle, prompt in prompts.items()}
    add(driver, further, 6)
    driver.run(depth=2)
    assert sum(len(plan.state_swap_in) for plan in driver.plans) > 0
    driver.finish(prompts | further, reference, 6)


@pytest.mark.parametrize("num_state_slots", [2, 3])
def test_few_slots_let_fewer_sequences_run(
    num_state_slots: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    _, reference = references("lfm2")
    driver = drivers("lfm2", num_state_slots=num_state_slots)
    prompts = dict(enumerate(prompts_of([17, 17, 9, 5], seed=4)))
    prompts[1] = prompts[0] + prompts[1]
    add(driver, prompts, 8)
    driver.step(2)
    assert driver.scheduler.num_running < num_state_slots
    driver.finish(prompts, reference, 8)


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_any_chunk_length_gives_same_tokens(
    budget: int, references: Any, drivers: Callable[..., RankedDriver]
) -> None:
    _, reference = references("qwen3_next")
    driver = drivers("qwen3_next", budget=budget)
    prompts = dict(enumerate(prompts_of([33, 14], seed=5)))
    add(driver, prompts, 6)
    driver.finish(prompts, reference, 6)


def test_further_outputs_start_from_a_snapshot(references: Any, drivers: Callable[..., RankedDriver]) -> None:
    _, reference = references("lfm2")
    driver = drivers("lfm2")
    (prompt,) = prompts_of([22], seed=6)
    driver.add(0, prompt, max_tokens=8, ignore_eos=True, n=3)
    driver.finish(dict.fromkeys(range(3), prompt), reference, 8)
    assert driver.scheduler.blocks.num_hit_tokens == 2 * 20


def test_beams_equal_transformers(references: Any, drivers: Callable[..., RankedDriver]) -> None:
    _, reference = references("qwen3_next")
    driver = drivers("qwen3_next")
    (prompt,) = prompts_of([18], seed=7)
    driver.add(0, prompt, max_tokens=9, n=2, beam_width=3, ignore_eos=True)
    driver.run(depth=2)
    with torch.inference_mode():
        expected = reference.model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=2, max_new_tokens=9, min_new_tokens=9,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
    assert [driver.outputs[handle] for handle in (0, 1)] == expected[:, len(prompt) :].tolist()
    assert any(plan.state_copies.size for plan in driver.plans)  # forks


def test_failed_step_computes_states_again(references: Any, drivers: Callable[..., RankedDriver]) -> None:
    """After a failure that leaves the memory, rows go on from snapshots and not from states that a step changed."""
    _, reference = references("lfm2")
    driver = drivers("lfm2")
    prompts = dict(enumerate(prompts_of([25, 18], seed=8)))
    add(driver, prompts, 12)
    for _ in range(8):
        driver.step(2)
    driver.plan()
    assert driver.scheduler.num_in_flight
    driver.group.gather(1.0)  # the ranks have computed a step of which no result is known
    driver.lose_ranks(kept=KvTiers.ALL)
    driver.finish(prompts, reference, 12)
    assert driver.scheduler.stats.num_retained_tokens > 0


def test_sleep_forgets_snapshots(references: Any, drivers: Callable[..., RankedDriver]) -> None:
    _, reference = references("lfm2")
    driver = drivers("lfm2")
    (prompt,) = prompts_of([25], seed=9)
    add(driver, {0: prompt}, 5)
    driver.run()
    assert driver.scheduler.blocks.state_slots.num_snapshots > 0
    driver.scheduler.blocks.keep_tiers(KvTiers.NONE)
    assert driver.scheduler.blocks.state_slots.num_snapshots == 0
    add(driver, {1: prompt}, 5)
    driver.finish({0: prompt, 1: prompt}, reference, 5)
    assert driver.scheduler.blocks.num_hit_tokens == 0
