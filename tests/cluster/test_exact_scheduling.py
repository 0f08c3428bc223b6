"""What the scheduler does to sequences changes no token of any family: prefix hits, and preemption in both modes.

The families differ in what a rank remembers of a sequence beside its keys: windows, positions, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from reference import Reference, prompts_of

from quire.cluster.llm import LLM, RequestOutput
from quire.proto.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "qwen3_moe": {},
    "opt": {},
    "bloom": {},
}


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, make_model: Any) -> Iterator[tuple[str, Reference]]:
    folder = make_model(request.param, seed=7, **KINDS[request.param])
    return str(folder), Reference(folder)


def check(results: list[RequestOutput], reference: Reference) -> None:
    for result in results:
        reference.check_greedy(result.prompt_token_ids, result.outputs[0].token_ids)


def test_prefix_hits(served: tuple[str, Reference]) -> None:
    folder, reference = served
    (prefix,) = prompts_of([40], seed=1)
    prompts = [
        prefix[:length] + tail for length, tail in zip((40, 33, 40), prompts_of([9, 3, 1], 2), strict=True)
    ]
    with LLM(folder, device="cpu", dtype="float32", block_size=8, num_kv_blocks=64) as llm:
        scheduler = llm._engine._engine.scheduler  # type: ignore[attr-defined]
        check(llm.generate([prefix], GREEDY), reference)
        assert scheduler.blocks.num_hit_tokens == 0
        check(llm.generate(prompts, GREEDY), reference)
        assert scheduler.blocks.num_hit_tokens == 40 + 32 + 40


@pytest.mark.parametrize("num_host_kv_blocks", [0, 64], ids=["recomputed", "swapped"])
def test_preempt_and_resume(served: tuple[str, Reference], num_host_kv_blocks: int) -> None:
    folder, reference = served
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        block_size=4,
        num_kv_blocks=28,
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefix_caching=False,
    ) as llm:
        scheduler = llm._engine._engine.scheduler  # type: ignore[attr-defined]
        scheduler._state.costs.swap_blocks_per_s = 1e9  # wherever there is host memory, swap
        check(llm.generate(prompts_of([17, 22, 9, 13], seed=3), GREEDY), reference)
        assert scheduler.stats.num_preemptions > 0
        assert (scheduler.blocks.num_swapped_blocks > 0) == (num_host_kv_blocks > 0)
