"""Ranks in pipeline stages compute the tokens of transformers, and the logits of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_kinds import model_type_of
from ranked_driver import RankedDriver
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS

from benchmarks.draft_lengths import fixed_lengths
from quire.proto.config import SpeculativeConfig
from quire.proto.errors import RankFailed
from quire.proto.model.registry import state_layers
from quire.scheduler.kv.kv_tiers import KvTiers

# Model type |-> overrides that give it four layers or more.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "qwen3_moe": {"num_hidden_layers": 4},
    "gemma3_text": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "glm_moe_dsa": {},
}
# Blocks that are too few for four sequences at once, if there are several cache groups.
SCARCE_BLOCKS = {"gemma3_text": 64, "gpt_oss": 44}
DRAFTS = SpeculativeConfig("ngram", 4)
STATE_SPLITS = [
    ("qwen3_next", 2, 2, None),
    ("qwen3_next", 2, 2, DRAFTS),
    ("kimi_linear", 3, 1, None),
    ("bamba", 2, 1, DRAFTS),
    pytest.param("mamba", 2, 1, DRAFTS, marks=pytest.mark.slow),
    pytest.param("lfm2", 2, 1, DRAFTS, marks=pytest.mark.slow),
    pytest.param("lfm3", 2, 1, None, marks=pytest.mark.slow),
    pytest.param("bamba", 2, 2, None, marks=pytest.mark.slow),
]
SPLITS = [
    ("llama", 2, 1),
    ("llama", 4, 2),
    ("deepseek_v3", 2, 2),
    ("gemma3_text", 2, 1),
    pytest.param(("qwen3_moe", 4, 1), marks=pytest.mark.slow),
    pytest.param(("gpt_oss", 2, 2), marks=pytest.mark.slow),
    pytest.param(("glm_moe_dsa", 2, 1), marks=pytest.mark.slow),
]
NUM_BLOCKS, MAX_TOKENS = 240, 24


@dataclass(frozen=True)
class Ranks:
    """The ranks of a model, and the model in transformers."""

    kind: str
    engine: Any
    reference: Reference

    def driver(self, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> RankedDriver:
        return RankedDriver.of(self.engine, num_blocks, num_host_blocks)


@pytest.fixture(scope="module")
def references(make_model: Callable[..., Path]) -> dict[str, tuple[Path, Reference]]:
    folders = {kind: make_model(kind, seed=7, **overrides) for kind, overrides in KINDS.items()}
    return {kind: (folder, Reference(folder)) for kind, folder in folders.items()}


@pytest.fixture(scope="module", params=SPLITS, ids=str)
def ranks(
    request: pytest.FixtureRequest, references: dict[str, tuple[Path, Reference]], make_engine: Any
) -> Ranks:
    kind, pp, tp = request.param
    folder, reference = references[kind]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_host_blocks": NUM_BLOCKS}
    engine = make_engine(folder, tp, num_blocks=NUM_BLOCKS, block_size=4, pp=pp, **settings)
    return Ranks(kind, engine, reference)


def numbered(prompts: list[list[int]]) -> dict[int, list[int]]:
    return dict(enumerate(prompts))


def test_stages_hold_their_layers_only(ranks: Ranks) -> None:
    engine = ranks.engine
    decoders = [runner.memory.loaded.model for runner in engine.runners]
    sizes = [len(decoder.layers) for decoder in decoders[:: engine.split.tensor]]
    assert tuple(sizes) == engine.split.stage_sizes
    caches = [len(runner.memory.kv.cache.layers) for runner in engine.runners[:: engine.split.tensor]]
    assert caches == sizes


def test_tokens_are_those_of_transformers(ranks: Ranks) -> None:
    driver = ranks.driver()
    prompts = numbered(prompts_of([30, 5, 17], seed=4))
    driver.add_all(prompts, MAX_TOKENS)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)


def test_prefix_hits_keep_the_tokens(ranks: Ranks) -> None:
    (prefix,) = prompts_of([40], seed=1)
    tails = prompts_of([9, 3], seed=2)
    later = {1 + index: prefix[:32] + tail for index, tail in enumerate(tails)}
    driver = ranks.driver()
    driver.add_all({0: prefix}, MAX_TOKENS)
    driver.run(depth=3)
    driver.add_all(later, MAX_TOKENS)
    driver.finish({0: prefix, **later}, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.blocks.num_hit_tokens == 32 + 32


@pytest.mark.parametrize("num_host_blocks", [0, NUM_BLOCKS], ids=["recomputed", "swapped"])
def test_preempted_sequences_keep_the_tokens(ranks: Ranks, num_host_blocks: int) -> None:
    driver = ranks.driver(SCARCE_BLOCKS.get(ranks.kind, 28), num_host_blocks)
    driver.scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
    prompts = numbered(prompts_of([17, 22, 9, 13], seed=3))
    driver.add_all(prompts, MAX_TOKENS)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)
    assert driver.scheduler.stats.num_preemptions > 0
    assert (driver.scheduler.blocks.num_swapped_blocks > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("kept", [KvTiers.NONE, KvTiers.ALL])
def test_failed_ranks_keep_the_tokens(ranks: Ranks, kept: KvTiers) -> None:
    prompts = numbered(prompts_of([30, 5], seed=5))
    driver = ranks.driver()
    driver.add_all(prompts, MAX_TOKENS)
    while min(map(len, driver.outputs.values())) < MAX_TOKENS // 2:
        driver.step(depth=3)
    driver.scheduler.interrupt(RankFailed(0, "killed", None), driver.now)
    driver.group = RankedDriver(driver.config, ranks.engine.step).group  # no plans in flight
    ranks.engine.forget_transfers()
    ranks.engine.on_all(lambda runner: runner.reset(has_new_ranks=not kept), ranks.engine.runners)
    caches = driver.scheduler.blocks.prefixes.caches if kept else []
    ranks.engine.lose_blocks(
        [block for block in range(NUM_BLOCKS) if not any(block in cache for cache in caches)]
    )
    driver.scheduler.resume(driver.scheduler.epoch + 1, kept, has_new_ranks=not kept)
    driver.finish(prompts, ranks.reference, MAX_TOKENS)


def test_logits_and_processors_are_those_of_one_rank(
    ranks: Ranks, make_engine: Any, references: dict[str, tuple[Path, Reference]]
) -> None:
    """Log-probabilities, penalties, beams, seeds and forms."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_host_blocks": NUM_BLOCKS}
    folder, _ = references[ranks.kind]
    engine = make_engine(folder, num_blocks=NUM_BLOCKS, block_size=4, **settings)
    one = Ranks(ranks.kind, engine, ranks.reference)
    requests: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 3, "logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"beam_width": 3, "n": 2},
        {"temperature": 0.8, "top_p": 0.9, "n": 2, "seed": 9, "min_tokens": 3},
    ]
    found = []
    for each in (one, ranks):
        driver = each.driver()
        for number, (prompt, request) in enumerate(
            zip(prompts_of([30, 5, 9, 12], seed=6), requests, strict=True)
        ):
            driver.add(10 * number, prompt, max_tokens=12, ignore_eos=True, **request)
        driver.run(depth=3)
        driver.empty_ranks()
        found.append((driver.outputs, driver.scores, driver.logprobs))
    (outputs, scores, logprobs), (own_outputs, own_scores, own_logprobs) = found
    assert own_outputs == outputs
    for handle, entries in scores.items():
        assert [place for place, _ in own_scores[handle]] == [place for place, _ in entries]
        assert [p for _, p in own_scores[handle]] == pytest.approx([p for _, p in entries], abs=1e-4)
    assert own_logprobs.keys() == logprobs.keys()
    assert [e[0] for e in own_logprobs[0]] == pytest.approx([e[0] for e in logprobs[0]], abs=1e-4)


@pytest.mark.parametrize(("kind", "pp", "tp", "drafts"), STATE_SPLITS)
def test_states_of_each_stage_keep_the_tokens(
    kind: str, pp: int, tp: int, drafts: SpeculativeConfig | None, make_model: Any, make_engine: Any
) -> None:
    """After prefix hits, from snapshots, and after preemptions."""
    folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "num_state_slots": 24, "speculative": drafts}
    engine, reference = make_engine(folder, tp, block_size=4, pp=pp, **settings), Reference(folder)
    layers = [runner.memory.kv.cache.states for runner in engine.runners[::tp]]
    assert sum(map(len, layers)) == len(state_layers(engine.config.model, tp))
    config = engine.config.with_num_blocks(44)
    driver = RankedDriver(config, engine.step)
    (prefix,), tails = prompts_of([29], seed=1), prompts_of([6, 3, 9], seed=2)
    driver.add_all({0: prefix}, MAX_TOKENS)
    with fixed_lengths(None if drafts is None else 3):
        driver.run(depth=pp + 1)
        turn = prefix + driver.outputs[0]
        prompts = {0: prefix, **{1 + index: turn[: 40 + index] + tail for index, tail in enumerate(tails)}}
        driver.add_all({handle: prompt for handle, prompt in prompts.items() if handle}, MAX_TOKENS)
        driver.finish(prompts, reference, MAX_TOKENS)
    assert driver.scheduler.blocks.num_hit_tokens > 0
    assert (driver.scheduler.stats.num_drafts > 0) == (drafts is not None)
