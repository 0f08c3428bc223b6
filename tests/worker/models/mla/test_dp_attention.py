"""Data-parallel attention: greedy tokens equal transformers', and each rank holds its own sequences only.

Chunks, forks, prefix hits, preemptions and moves are in the scheduler's plans, as in test_exact_scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import MLP, merge, write_adapter
from model_kinds import model_type_of
from quick_cases import slow_except
from ranked_driver import RankedDriver
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from quire.proto.config import LoraConfig
from quire.proto.errors import RankFailed
from quire.proto.lora import LoraReference
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.worker.models.mixers.mla import MlaAttention
from quire.worker.rank.warm_up import warm_up_plans

BLOCK_SIZE, MAX_TOKENS = 4, 24
# Blocks of each rank: enough for all sequences, and too few for two sequences at once.
MANY, FEW = 120, 16
KINDS = "deepseek_v3", "glm_moe_dsa"
# Ranks of a stage, the groups of them that attend together, stages, and the kind of model.
SPLITS = [
    (4, 2, 1, "deepseek_v3"),
    (2, 2, 1, "glm_moe_dsa"),
    (2, 2, 2, "deepseek_v3"),
    pytest.param((2, 2, 1, "deepseek_v3"), marks=pytest.mark.slow),
    pytest.param((4, 4, 1, "deepseek_v3"), marks=pytest.mark.slow),
    pytest.param((4, 2, 1, "glm_moe_dsa"), marks=pytest.mark.slow),
]

Models = dict[str, tuple[Path, Reference]]


@dataclass(frozen=True)
class Ranks:
    """Engines with many and with few blocks, and the model in transformers."""

    tp: int
    groups: int
    make: Callable[[int], Any]
    reference: Reference

    def driver(self, num_blocks: int = MANY, *, swaps: bool = False) -> tuple[RankedDriver, Any]:
        engine = self.make(num_blocks)
        config = engine.config.with_num_blocks(num_blocks)
        if not swaps:
            config = replace(config, cache=replace(config.cache, num_host_kv_blocks=0))
        driver = RankedDriver(config, engine.step)
        driver.scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
        return driver, engine


@pytest.fixture(scope="module")
def models(make_model: Callable[..., Path]) -> Models:
    """Return a model with dense and a model with sparse attention."""
    return {kind: (folder, Reference(folder)) for kind in KINDS for folder in [make_model(kind, seed=7)]}


@pytest.fixture(scope="module", params=SPLITS, ids=str)
def ranks(request: pytest.FixtureRequest, models: Models, make_engine: Any) -> Ranks:
    tp, groups, pp, kind = request.param
    folder, reference = models[kind]
    engines: dict[int, Any] = {}

    def make(num_blocks: int) -> Any:
        if num_blocks not in engines:
            engines[num_blocks] = make_engine(
                folder, tp, pp=pp, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=6,
                max_num_batched_tokens=24, num_host_blocks=MANY, enable_dp_attention=True, max_model_len=60,
                dp_attention_size=groups,
            )  # fmt: skip
        return engines[num_blocks]

    return Ranks(tp, groups, make, reference)


def add_all(driver: RankedDriver, prompts: dict[int, list[int]], **settings: Any) -> None:
    for handle, prompt in prompts.items():
        generated = driver.outputs.get(handle, [])
        driver.add(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, generated=generated, **settings)


def numbered(prompts: list[list[int]]) -> dict[int, list[int]]:
    return dict(enumerate(prompts))


def partitions_in_use(driver: RankedDriver) -> set[int]:
    state = driver.scheduler._state
    return {state.blocks.rows.partition_of(row) for row in state.running}


def test_sequences_are_divided_among_the_ranks(ranks: Ranks) -> None:
    """One sequence leaves the other ranks without rows; more sequences use all of them."""
    prompts = numbered(prompts_of([30, 9, 17, 5, 26], seed=3))
    driver, _ = ranks.driver()
    add_all(driver, {0: prompts[0]})
    for _ in range(3):
        driver.step()
    assert len(partitions_in_use(driver)) == 1
    add_all(driver, {handle: prompt for handle, prompt in prompts.items() if handle})
    while len(driver.scheduler._state.running) < len(prompts):
        driver.step(depth=2)
    assert partitions_in_use(driver) == set(range(ranks.groups))
    driver.finish(prompts, ranks.reference, MAX_TOKENS)


@pytest.mark.parametrize(
    ("kind", "tp", "groups"),
    slow_except(
        [("kimi_linear", 2, 2), ("bailing_hybrid", 4, 4), ("kimi_linear", 4, 2)],
        [(kind, *split) for kind in ("kimi_linear", "bailing_hybrid") for split in ((2, 2), (4, 4), (4, 2))],
    ),
)
def test_states_stay_with_all_ranks(
    kind: str, tp: int, groups: int, make_model: Callable[..., Path], make_engine: Any
) -> None:
    """The ranks divide the sequences' latents, and the heads of the layers with states; a hit needs both."""
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
    engine = make_engine(
        folder, tp, num_blocks=FEW, block_size=BLOCK_SIZE, max_num_seqs=6, max_num_batched_tokens=24,
        enable_dp_attention=True, max_model_len=60, num_state_slots=12, dp_attention_size=groups,
    )  # fmt: skip
    driver = RankedDriver(engine.config.with_num_blocks(FEW), engine.step)
    prompts = numbered(prompts_of([30, 9, 17, 5, 26], seed=3))
    add_all(driver, prompts)
    while len(partitions_in_use(driver)) < groups:
        driver.step(depth=2)
    driver.run(depth=2)
    assert driver.scheduler.stats.num_preemptions > 0
    add_all(driver, {5: prompts[1] + driver.outputs[1] + [7, 8, 9]})
    prompts[5] = prompts[1] + driver.outputs[1] + [7, 8, 9]
    driver.run(depth=2)
    assert driver.scheduler.blocks.num_hit_tokens > 0
    driver.finish(prompts, Reference(folder), MAX_TOKENS)


def test_prefix_hits_keep_the_tokens(ranks: Ranks) -> None:
    """A sequence goes to the rank that has its prefix; the end of a prefix within a block is copied there."""
    (prefix,) = prompts_of([28], seed=1)
    tails = prompts_of([7, 3, 1], seed=2)
    driver, _ = ranks.driver()
    prompts = {0: prefix}
    add_all(driver, prompts)
    driver.run(depth=2)
    for handle, (length, tail) in enumerate(zip((28, 20, 26), tails, strict=True), 1):
        prompts[handle] = prefix[:length] + tail
        add_all(driver, {handle: prompts[handle]})
        driver.run(depth=2)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.blocks.num_hit_tokens == 28 + 20 + 26
    copies = [plan.copies for plan in driver.plans if len(plan.copies)]
    assert len(copies) == 1


@pytest.mark.parametrize(
    "swaps",
    [pytest.param(False, marks=pytest.mark.slow), True],  # those that change ranks are recomputed
    ids=["recomputed", "swapped"],
)
def test_preempted_sequences_keep_the_tokens(ranks: Ranks, swaps: bool) -> None:
    driver, _ = ranks.driver(FEW, swaps=swaps)
    prompts = numbered(prompts_of([17, 22, 9, 13, 20, 8], seed=3))
    add_all(driver, prompts)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.stats.num_preemptions > 0
    assert (driver.scheduler.blocks.num_swapped_blocks > 0) == swaps


def test_preempted_sequences_change_ranks(ranks: Ranks) -> None:
    """Short sequences start while another rank is full, and preempted ones continue where there is room."""
    driver, _ = ranks.driver(FEW)
    prompts = numbered(prompts_of([31, 5, 30, 6, 28, 7, 26, 4], seed=8))
    add_all(driver, prompts)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    partitions: dict[int, set[int]] = {}
    for new in (new for plan in driver.plans for new in plan.new):
        partitions.setdefault(new.seq_id, set()).add(int(new.block_ids.max()) // FEW)
    assert set[int]().union(*partitions.values()) == set(range(ranks.groups))
    assert any(len(used) > 1 for used in partitions.values())


def test_forks_stay_on_the_rank_of_their_parent(ranks: Ranks) -> None:
    (prompt,) = prompts_of([30], seed=4)
    driver, _ = ranks.driver()
    add_all(driver, {0: prompt}, n=3)
    while len(driver.scheduler._state.running) < 3:
        driver.step(depth=2)
    assert len(partitions_in_use(driver)) == 1
    driver.finish(dict.fromkeys(range(3), prompt), ranks.reference, MAX_TOKENS)


@pytest.mark.parametrize("kept", [KvTiers.NONE, KvTiers.ALL])
def test_failed_ranks_keep_the_tokens(ranks: Ranks, kept: KvTiers) -> None:
    """The content of their KV memory is lost, or what the scheduler does not list of it."""
    prompts = numbered(prompts_of([30, 5, 12], seed=5))
    driver, engine = ranks.driver()
    add_all(driver, prompts)
    while min(map(len, driver.outputs.values())) < MAX_TOKENS // 2:
        driver.step(depth=2)
    driver.scheduler.interrupt(RankFailed(0, "killed", None), driver.now)
    driver.group = RankedDriver(driver.config, engine.step).group  # no plans in flight
    engine.forget_transfers()
    engine.on_all(lambda runner: runner.reset(has_new_ranks=not kept), engine.runners)
    caches = driver.scheduler.blocks.prefixes.caches if kept else []
    for rank, runner in enumerate(engine.runners):
        for layer in runner.memory.kv.cache.layers:
            for block in range(MANY):
                if not any(engine.split.place_of(rank).attention * MANY + block in cache for cache in caches):
                    layer.blocks[block].fill_(torch.nan)
    driver.scheduler.resume(driver.scheduler.epoch + 1, kept, has_new_ranks=not kept)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert (driver.scheduler.stats.num_retained_tokens > 0) == bool(kept)


def test_ranks_hold_the_latents_of_their_own_sequences_only(ranks: Ranks) -> None:
    """Each group has written no more blocks than its sequences have."""
    prompts = numbered(prompts_of([30, 17], seed=6))
    driver, engine = ranks.driver()
    engine.lose_blocks()
    add_all(driver, prompts)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    num_written = [
        int((~runner.memory.kv.cache.layers[0].blocks[1:].isnan().flatten(1).all(dim=1)).sum())
        for runner in engine.runners[-ranks.tp :: ranks.tp // ranks.groups]  # of the last stage
    ]
    num_blocks = [-(-(len(prompt) + MAX_TOKENS - 1) // BLOCK_SIZE) for prompt in prompts.values()]
    assert sorted(num_written, reverse=True) == sorted(num_blocks, reverse=True) + [0] * (ranks.groups - 2)


@pytest.mark.parametrize(("tp", "groups"), slow_except([(4, 2)], [(2, 2), (4, 4), (4, 2)]))
def test_adapters_change_the_sequences_of_each_rank(
    models: Models, make_engine: Any, tmp_path: Path, tp: int, groups: int
) -> None:
    folder, reference = models["deepseek_v3"]
    latents = "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"
    paths = [
        write_adapter(tmp_path / f"adapter{seed}", folder, modules, seed=seed)
        for seed, modules in enumerate((latents, (*latents, *MLP, "gate")))
    ]
    references = [
        *(Reference(merge(tmp_path / f"merged{index}", folder, path)) for index, path in enumerate(paths)),
        reference,
    ]
    engine = make_engine(
        folder, tp, num_blocks=FEW, block_size=BLOCK_SIZE, max_num_seqs=6, max_num_batched_tokens=24,
        enable_dp_attention=True, max_model_len=60, lora=LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2),
        dp_attention_size=groups,
    )  # fmt: skip
    driver = RankedDriver(engine.config.with_num_blocks(FEW), engine.step)
    prompts = prompts_of([17, 22, 9, 13, 20, 8], seed=3)
    for handle, prompt in enumerate(prompts):
        adapter = handle % 3
        lora = LoraReference(str(adapter), str(paths[adapter])) if adapter < 2 else None
        driver.add(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, lora=lora)
    driver.run(depth=2)
    for handle, prompt in enumerate(prompts):
        references[handle % 3].check_greedy(prompt, driver.outputs[handle])
    assert references[0].generate(prompts[0], 6) != reference.generate(prompts[0], 6)


def test_warm_up_reaches_the_attention_of_each_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each rank launches every kernel before it is ready."""
    _, engine = ranks.driver()
    computed: list[int] = []
    attend = MlaAttention._attend_all

    def record(attention: MlaAttention, *inputs: Any) -> Any:
        computed.append(attention.comm.rank)
        return attend(attention, *inputs)

    monkeypatch.setattr(MlaAttention, "_attend_all", record)
    for plan in warm_up_plans(engine.config, MANY):
        engine.step(plan)
    assert set(computed) == set(range(ranks.tp))
    assert all(runner.memory.rows.tables.digest == 0 for runner in engine.runners)


def test_profile_run_has_all_tokens_on_each_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = ranks.driver()
    num_tokens: list[int] = []
    attend = MlaAttention._attend_all

    def record(attention: MlaAttention, x: Any, *rest: Any) -> Any:
        num_tokens.append(len(x))
        return attend(attention, x, *rest)

    monkeypatch.setattr(MlaAttention, "_attend_all", record)
    engine.on_all(lambda runner: runner.memory.run_largest_steps(), engine.runners)
    num_layers, num_decoded = engine.config.model.num_layers, engine.config.max_decode_tokens
    assert num_tokens.count(24) == num_tokens.count(num_decoded) == ranks.tp * num_layers
