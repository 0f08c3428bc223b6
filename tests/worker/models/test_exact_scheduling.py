"""Greedy tokens equal transformers' after chunks, prefix hits, preemptions, moves and failures.

The models have blocks of several cache groups, latents, or layers of their own kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from quire.proto.errors import RankFailed
from quire.scheduler.kv.kv_tiers import KvTiers

# Model type, variant and ranks |-> windows of the cache groups. A token of Gemma 4's full layers takes as much memory
# as one of the others, twice as much on four ranks, and half of it in the variant.
WINDOWS = {
    "gemma3_text-2": [0, 24, 24],
    "gemma3_text-4": [0, 24, 24],
    "gpt_oss-2": [0, 11, 11],
    "gpt_oss-4": [0, 11, 11],
    "deepseek_v3-2": [0],
    "deepseek_v3-4": [0],
    "deepseek_v32-1": [0],
    "glm_moe_dsa-2": [0],
    "gemma4_text-1": [0, 11],
    "gemma4_text-4": [0, 0, 11],
    "gemma4_text_narrow-2": [0, 11, 11],
    "gemma3n_text-1": [0, 11],
    "gemma3n_text-2": [0, 11],
    "gemma3n_text-4": [0, 11],
    "mimo_v2_flash-2": [0, 11, 11],
    "mistral4-2": [0],
    "longcat_flash-2": [0],
    "axk2-2": [0],
    "gptj-1": [0],
    "gptj-2": [0],
    "gptj-4": [0],
    "qwen3_moe-1": [0],
    "llama4_text-1": [0, 20, 20, 20],
    "opt-1": [0],
    "bloom-1": [0],
}
# These have the cache groups of another number of ranks, or the cache of another kind.
SLOW = {"gemma3_text-4", "gpt_oss-2", "deepseek_v3-4", "gemma3n_text-1", "gemma3n_text-4", "gptj-1", "gptj-4"}
SLOW |= {"mistral4-2", "longcat_flash-2", "axk2-2", "qwen3_moe-1", "bloom-1"}
# Model type and variant |-> blocks that are too few for four sequences at once.
SCARCE_BLOCKS = {
    "gemma3_text": 64,
    "gpt_oss": 44,
    "deepseek_v3": 28,
    "deepseek_v32": 28,
    "glm_moe_dsa": 28,
    "gemma4_text": 40,
    "gemma4_text_narrow": 40,
    "gemma3n_text": 40,
    "mimo_v2_flash": 44,
    "mistral4": 28,
    "longcat_flash": 28,
    "axk2": 28,
    "gptj": 28,
    "qwen3_moe": 28,
    "llama4_text": 56,  # blocks of four cache groups
    "opt": 28,
    "bloom": 28,
}
# Variant |-> its model type, and overrides.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text_narrow": ("gemma4_text", {"global_head_dim": 16})
}
NUM_BLOCKS, MAX_TOKENS = 240, 24


@dataclass(frozen=True)
class Ranks:
    """The ranks of a model, and the model in transformers."""

    engine: Any
    reference: Reference
    num_scarce_blocks: int

    def driver(self, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> RankedDriver:
        return RankedDriver.of(self.engine, num_blocks, num_host_blocks)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in WINDOWS],
)
def ranks(request: pytest.FixtureRequest, make_model: Callable[..., Path], make_engine: Any) -> Ranks:
    kind, tp = request.param.split("-")
    model_type, overrides = VARIANTS.get(kind, (kind, {}))
    folder = make_model(model_type, seed=7, **overrides)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_host_blocks": NUM_BLOCKS}
    engine = make_engine(folder, int(tp), num_blocks=NUM_BLOCKS, block_size=4, **settings)
    assert [group.window for group in engine.config.cache_layout.groups] == WINDOWS[request.param]
    return Ranks(engine, Reference(folder), SCARCE_BLOCKS[kind])


def numbered(prompts: list[list[int]]) -> dict[int, list[int]]:
    return dict(enumerate(prompts))


def test_prefix_hits_keep_the_tokens(ranks: Ranks) -> None:
    (prefix,) = prompts_of([40], seed=1)
    tails = prompts_of([9, 3, 1], seed=2)
    later = {
        1 + index: prefix[:length] + tail
        for index, (length, tail) in enumerate(zip((40, 32, 40), tails, strict=True))
    }
    driver = ranks.driver()
    driver.add_all({0: prefix}, MAX_TOKENS)
    driver.run(depth=2)
    assert driver.scheduler.blocks.num_hit_tokens == 0
    driver.add_all(later, MAX_TOKENS)
    driver.finish({0: prefix, **later}, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.blocks.num_hit_tokens == 40 + 32 + 40


@pytest.mark.parametrize(
    "num_host_blocks",
    [pytest.param(0, marks=pytest.mark.slow), NUM_BLOCKS],  # those of test_exactness are recomputed
    ids=["recomputed", "swapped"],
)
def test_preempted_sequences_keep_the_tokens(ranks: Ranks, num_host_blocks: int) -> None:
    driver = ranks.driver(ranks.num_scarce_blocks, num_host_blocks)
    driver.scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
    prompts = numbered(prompts_of([17, 22, 9, 13], seed=3))
    driver.add_all(prompts, MAX_TOKENS)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.stats.num_preemptions > 0
    assert (driver.scheduler.blocks.num_swapped_blocks > 0) == (num_host_blocks > 0)


def test_moved_sequences_keep_the_tokens(ranks: Ranks) -> None:
    """They continue on a replica that has nothing of them in its cache."""
    prompts = numbered(prompts_of([30, 5], seed=4))
    first, second = ranks.driver(), ranks.driver()
    first.add_all(prompts, MAX_TOKENS)
    while min(map(len, first.outputs.values())) < MAX_TOKENS // 2:
        first.step(depth=2)
    first.scheduler.drain(0.0, first.now)
    first.run(depth=2)
    first.empty_ranks()
    assert set(first.moved) == set(prompts)
    second.outputs = first.outputs
    second.add_all(prompts, MAX_TOKENS)
    second.finish(prompts, ranks.reference, MAX_TOKENS)


@pytest.mark.parametrize("kept", [KvTiers.NONE, KvTiers.ALL])
def test_failed_ranks_keep_the_tokens(ranks: Ranks, kept: KvTiers) -> None:
    """The content of their KV memory is lost, or what the scheduler does not list of it."""
    prompts = numbered(prompts_of([30, 5], seed=5))
    driver = ranks.driver()
    driver.add_all(prompts, MAX_TOKENS)
    while min(map(len, driver.outputs.values())) < MAX_TOKENS // 2:
        driver.step(depth=2)
    driver.scheduler.interrupt(RankFailed(0, "killed", None), driver.now)
    driver.group = RankedDriver(driver.config, ranks.engine.step).group  # no plans in flight
    ranks.engine.on_all(lambda runner: runner.reset(has_new_ranks=not kept), ranks.engine.runners)
    caches = driver.scheduler.blocks.prefixes.caches if kept else []
    ranks.engine.lose_blocks(
        [block for block in range(NUM_BLOCKS) if not any(block in cache for cache in caches)]
    )
    driver.scheduler.resume(driver.scheduler.epoch + 1, kept, has_new_ranks=not kept)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert (driver.scheduler.stats.num_retained_tokens > 0) == bool(kept)
