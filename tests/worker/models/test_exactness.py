"""Greedy tokens equal transformers' for any ranks, batches and chunks, and after prefix hits and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_kinds import KINDS, TYPICAL, is_installed, model_type_of, ranks_for
from quick_cases import slow_except
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)


# Kind and number of ranks: `make test` runs each kind with one rank and with two or four.
CASES = [(kind, tp) for kind in KINDS if is_installed(kind) for tp in ranks_for(kind)]
QUICK = [(kind, tp) for kind, tp in CASES if tp == 1 or (tp == 4) == ("-" in kind or kind in TYPICAL)]
# What the scheduler's steps add depends on the layout of the cache, of which test_exact_scheduling has more.
OF_FAMILIES = [(kind, tp) for kind, tp in CASES if "-" not in kind]
QUICK_OF_FAMILIES = [
    (kind, tp) for kind, tp in OF_FAMILIES if kind == "llama" or (kind in TYPICAL and tp == 1)
]


References = Callable[[str], tuple[Path, Reference]]


@pytest.fixture(scope="module")
def references(make_model: Any) -> References:
    """`references(kind) -> folder, Reference`, for a kind of KINDS; cached."""
    made: dict[str, tuple[Path, Reference]] = {}

    def reference(kind: str) -> tuple[Path, Reference]:
        if kind not in made:
            folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
            made[kind] = folder, Reference(folder)
        return made[kind]

    return reference


@pytest.fixture(scope="module")
def engines(references: References, make_engine: Any) -> Callable[[str, int], Any]:
    """`engines(kind, tp) -> Engine` with four rows and blocks of eight tokens; cached."""
    made: dict[tuple[str, int], Any] = {}

    def engine(kind: str, tp: int) -> Any:
        if (kind, tp) not in made:
            made[kind, tp] = make_engine(references(kind)[0], tp, block_size=8, max_num_seqs=4)
        return made[kind, tp]

    return engine


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_single_request_equals_transformers(tp: int, references: References, make_engine: Any) -> None:
    folder, reference = references("llama")
    engine = make_engine(folder, tp)
    for prompt in prompts_of([5, 33], seed=6):
        (generated,) = engine.greedy([prompt], 20, chunk_len=16)
        reference.check_generate(prompt, generated)


@pytest.mark.parametrize(("kind", "tp"), slow_except(QUICK, CASES))
def test_mixed_batch_equals_transformers(
    kind: str, tp: int, references: References, engines: Callable[[str, int], Any], planned: Any
) -> None:
    _, reference = references(kind)
    engine = engines(kind, tp)
    # Lengths around multiples of block and chunk size; more sequences than rows; arrivals while others decode.
    lengths = [1, 8, 9, 20, 41, 60]
    sequences = [
        planned(prompt, 5 + 2 * index, GREEDY, arrival=index)
        for index, prompt in enumerate(prompts_of(lengths, seed=1))
    ]
    engine.generate(sequences, chunk_len=20)
    generated = {token_id for sequence in sequences for token_id in sequence.generated}
    assert len(generated) > 10, "the output of the model is too repetitive for this test"
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


@pytest.mark.parametrize(("kind", "tp"), slow_except(QUICK_OF_FAMILIES, OF_FAMILIES))
def test_prefix_hits_and_preemptions_equal_transformers(
    kind: str, tp: int, references: References, engines: Callable[[str, int], Any]
) -> None:
    """The scheduler's steps have 12 tokens, so prompts are computed in chunks.

    What ranks divide is the same as in the mixed batch, which every kind computes with one rank and with the most.
    """
    (_, reference), engine = references(kind), engines(kind, tp)
    scheduler = replace(engine.config.scheduler, max_num_batched_tokens=12)

    def driver(num_blocks: int) -> RankedDriver:
        config = replace(engine.config, scheduler=scheduler)
        return RankedDriver(config.with_num_blocks(num_blocks), engine.step)

    def add(to: RankedDriver, prompts: dict[int, list[int]], max_tokens: int) -> None:
        for handle, prompt in prompts.items():
            to.add(handle, prompt, max_tokens=max_tokens, ignore_eos=True)

    (prefix,), tails = prompts_of([16], seed=1), prompts_of([5, 2, 9], seed=2)
    prompts = {1 + index: prefix + tail for index, tail in enumerate(tails)}
    ample = driver(engine.num_blocks)
    add(ample, {0: prefix}, 1)
    ample.run(depth=2)
    add(ample, prompts, 14)
    ample.finish(prompts, reference, 14)
    assert ample.scheduler.blocks.num_hit_tokens == 3 * len(prefix)
    # Enough for the longest sequence, but not for all.
    scarce = driver(1 + max(6 * len(engine.config.cache_layout.groups), 2 * _peak(ample) // 3))
    add(scarce, prompts, 14)
    scarce.finish(prompts, reference, 14)
    assert scarce.scheduler.stats.num_preemptions > 0


def _peak(driver: RankedDriver) -> int:
    """Return the most blocks that the sequences have held at once."""
    return driver.scheduler.stats.peak_used_blocks


def test_sequence_beyond_original_context_equals_transformers(
    references: References, make_engine: Any
) -> None:
    """With LongRoPE it has the factors of the long list from its first token on."""
    folder, reference = references("phi3-longrope")
    engine = make_engine(folder, 1, max_model_len=320)
    (prompt,) = prompts_of([270], seed=5)
    (generated,) = engine.greedy([prompt], 10, chunk_len=100)
    reference.check_greedy(prompt, generated)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_sequence_of_the_extended_context_equals_transformers(
    rope_type: str, make_model: Any, make_engine: Any
) -> None:
    """The base of `dynamic` is that of transformers for a sequence of max_model_len tokens."""
    rope = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0}
    folder = make_model("llama", seed=7, max_position_embeddings=48, rope_parameters=rope)
    engine = make_engine(folder, 1, max_model_len=160)
    (prompt,) = prompts_of([150], seed=5)
    (generated,) = engine.greedy([prompt], 10, chunk_len=40)
    Reference(folder).check_greedy(prompt, generated)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "opt", "bloom"])
def test_any_chunk_length_gives_same_tokens(kind: str, references: References, make_engine: Any) -> None:
    folder, reference = references(kind)
    engine = make_engine(folder, 1, block_size=4)
    (prompt,) = prompts_of([27 if kind == "gemma3_text" else 13], seed=4)  # longer than its window
    for chunk_len in range(1, len(prompt) + 1):
        (generated,) = engine.greedy([prompt], 5, chunk_len=chunk_len, seed=chunk_len)
        reference.check_greedy(prompt, generated)


@pytest.fixture(scope="module")
def demo_reference(demo_model_dir: Path) -> Reference:
    return Reference(demo_model_dir)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_single_request_of_demo_model_equals_transformers(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp)
    for prompt in prompts_of([3, 16, 40], seed=2):
        sequence = planned(prompt, 24, GREEDY)
        engine.generate([sequence], chunk_len=16)
        demo_reference.check_generate(sequence.prompt, sequence.generated)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_mixed_batch_of_demo_model_equals_transformers(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp, max_num_seqs=8)
    sequences = [planned(prompt, 20, GREEDY) for prompt in prompts_of([2, 15, 16, 17, 33, 50], seed=3)]
    engine.generate(sequences, chunk_len=17)
    for sequence in sequences:
        demo_reference.check_generate(sequence.prompt, sequence.generated)
