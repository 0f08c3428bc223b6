"""KvSegment: a KV cache in memory that outlives its process, and sequences that continue on it in another rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small_config
from ranked_driver import RankedDriver
from reference import prompts_of

from quire.proto.config import EngineConfig
from quire.proto.engine_command import Action, EngineCommand
from quire.proto.errors import RankFailed
from quire.proto.step import StepPlan, StepResult
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.worker.comm.communicator import SingleRank
from quire.worker.memory.cache_engine import CacheEngine, bytes_per_block
from quire.worker.memory.kv_memory import KvMemory
from quire.worker.memory.kv_segment import KvSegment
from quire.worker.memory.shared_segment import SegmentAddress
from quire.worker.rank.runner import ModelRunner

NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_TOKENS = 28, 40, 24


def make_cache(segment: KvSegment, **settings: Any) -> CacheEngine:
    config = small_config(num_host_blocks=NUM_HOST_BLOCKS)
    config = replace(config, cache=replace(config.cache, kv_cache_dtype="int8"))
    return CacheEngine(
        config, NUM_BLOCKS, NUM_HOST_BLOCKS, torch.float32, torch.device("cpu"), segment=segment, **settings
    )


def create_segment() -> KvSegment:
    config = small_config(num_host_blocks=NUM_HOST_BLOCKS)
    return KvSegment.create((NUM_BLOCKS + NUM_HOST_BLOCKS + 1) * bytes_per_block(config, torch.float32))


def parts(cache: CacheEngine) -> list[torch.Tensor]:
    return [*cache._parts, *cache._host_parts]


def test_cache_finds_what_the_one_before_left() -> None:
    with closing(create_segment()) as segment:
        first = make_cache(segment)
        for number, part in enumerate(parts(first)):
            assert not part.any()
            part.view(torch.uint8).fill_(1 + number)
        with closing(KvSegment.open(segment.address)) as inherited:
            second = make_cache(inherited, touches_pages=False)
    for before, after in zip(parts(first), parts(second), strict=True):
        assert before.data_ptr() != after.data_ptr()
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_cleared_segment_has_zeros() -> None:
    with closing(create_segment()) as segment:
        for part in parts(make_cache(segment)):
            part.view(torch.uint8).fill_(7)
        segment.clear()
        assert not any(part.any() for part in parts(make_cache(segment, touches_pages=False)))


class Rank:
    """One rank, which another one can replace.

    Attributes:
        runner: the present one.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = replace(config, parallel=replace(config.parallel, standby_weights=True))
        self.runner = self._start(None)

    def _start(self, inherited: SegmentAddress | None) -> ModelRunner:
        runner = ModelRunner(self._config, SingleRank())
        runner.allocate_cache(NUM_BLOCKS, touches_pages=inherited is None, inherited=inherited)
        return runner

    def step(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(StepPlan.decode(plan.encode()))

    def fail_in(self, plan: StepPlan) -> None:
        """End after a step whose result is lost, and that has left all that it wrote half written."""
        memory = parts(self.runner.memory.kv.cache)
        before = [part.clone() for part in memory]
        self.step(plan)
        for part, old in zip(memory, before, strict=True):
            part[part != old] = torch.nan

    def replace(self) -> None:
        runner = self._start(self.runner.kv_segment)
        assert runner.kv_segment is not None
        assert self.runner.kv_segment is not None
        assert runner.kv_segment.name == self.runner.kv_segment.name
        self.runner.close()
        self.runner = runner


@pytest.fixture(scope="module")
def config(make_model: Callable[..., Path], engine_config: Callable[..., EngineConfig]) -> EngineConfig:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_host_blocks": NUM_HOST_BLOCKS}
    config = engine_config(make_model("llama", seed=7), block_size=4, **settings)
    return config.with_num_blocks(NUM_BLOCKS)


def run(config: EngineConfig, failing_steps: tuple[int, ...]) -> tuple[dict[int, list[int]], int]:
    """Generate in a pool that is too small, with ranks that end; return the outputs and the number of kept tokens."""
    rank = Rank(config)
    driver = RankedDriver(config, rank.step)
    driver.scheduler._state.costs.swap_blocks_per_s = 1e9
    for handle, prompt in enumerate(prompts_of([17, 22, 9, 13], seed=3)):
        driver.add(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
    for failing_step in failing_steps:
        while len(driver.plans) < failing_step:
            driver.step(depth=2)
        while driver.scheduler.num_in_flight:
            driver.apply_result()
        plan = driver.plan()
        assert plan is not None
        rank.fail_in(plan)
        driver.scheduler.interrupt(RankFailed(0, "killed", None), driver.now)
        driver.group = RankedDriver(config, rank.step).group  # no plans in flight
        rank.replace()
        driver.scheduler.resume(driver.scheduler.epoch + 1, KvTiers.ALL, has_new_ranks=True)
    driver.run(depth=2)
    assert driver.scheduler.stats.num_preemptions > 0
    assert driver.scheduler.blocks.num_held_blocks == 0
    rank.runner.close()
    return driver.outputs, driver.scheduler.stats.num_retained_tokens


def test_rank_that_is_replaced_leaves_its_kv(config: EngineConfig) -> None:
    expected, _ = run(config, ())
    outputs, num_kept = run(config, (5, 20, 35))
    assert outputs == expected
    assert num_kept > 100


def test_rank_keeps_its_segment_over_sleep(config: EngineConfig) -> None:
    """The scheduler's process keeps the segment, and would hand an older one to the next rank."""
    with closing(Rank(config).runner) as runner:
        before = runner.kv_segment
        part = runner.memory.kv.cache.layers[0].blocks
        part.fill_(7.0)
        for step_id, action in enumerate((Action.SLEEP, Action.WAKE_UP), 1):
            runner.execute(StepPlan(step_id, 1, 0, command=EngineCommand(action, level=1)))
        assert runner.kv_segment == before
        assert not runner.memory.kv.cache.layers[0].blocks.any()


@pytest.mark.parametrize("standby_weights", [False, True])
def test_blocks_that_travel_are_in_a_segment_which_only_a_standby_inherits(standby_weights: bool) -> None:
    config = small_config()
    config = replace(
        config,
        cache=replace(config.cache, kv_transfer=True),
        parallel=replace(config.parallel, standby_weights=standby_weights),
    )
    memory = KvMemory(config, 0, torch.float32, torch.device("cpu"))
    assert memory.allocate(NUM_BLOCKS) is False
    assert memory.cache.segment is not None
    assert all(memory.cache.segment.has(layer.blocks) for layer in memory.cache.layers)
    assert (memory.segment is not None) == standby_weights
    memory.free()  # as sleep does
    memory.allocate(NUM_BLOCKS)
    assert not any(layer.blocks.any() for layer in memory.cache.layers)
    memory.close()
