"""Outputs of every model family equal those of transformers after prefix hits and both kinds of preemption.

The families differ in the state of a sequence beside its keys and values, in windows, latents, positions and experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from narrowing import not_none
from reference import Reference, prompts_of

from quire.cluster.offline.llm import LLM
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "llama4_text": {},
    "gemma4_text": {},
    "deepseek_v3": {},
    "opt": {},
    "bloom": {},
}
# Too few blocks for four sequences at once. Llama 4 needs four blocks, of four cache groups, for the same tokens.
SCARCE_BLOCKS = dict.fromkeys(KINDS, 28) | {"llama4_text": 48}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def served(kind: str, make_model: Any) -> tuple[str, Reference]:
    folder = make_model(kind, seed=7, **KINDS[kind])
    return str(folder), Reference(folder)


def check(results: list[RequestOutput], reference: Reference) -> None:
    for result in results:
        reference.check_greedy(not_none(result.prompt_token_ids), result.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0, "vocab_size": 387}),
        ("granite", {}),
        ("cohere2", {"logit_scale": 0.4}),
    ],
)
def test_scaled_and_bounded_logits_equal_transformers(
    make_model: Any, kind: str, settings: dict[str, Any]
) -> None:
    """Scaling does not change greedy tokens, but their probabilities."""
    folder = make_model(kind, seed=7, **settings)
    (prompt,) = prompts_of([12], seed=1)
    with LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=16) as llm:
        ((output,),) = (result.outputs for result in llm.generate([prompt], replace(GREEDY, logprobs=0)))
    with torch.inference_mode():
        logits = (
            Reference(folder).model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        )
    expected = logits.log_softmax(dim=-1)[range(len(output.token_ids)), output.token_ids]
    assert output.logprobs is not None
    chosen = [entry[own].logprob for entry, own in zip(output.logprobs, output.token_ids, strict=True)]
    torch.testing.assert_close(torch.tensor(chosen), expected, atol=1e-4, rtol=0)


def test_prefix_hits_keep_the_tokens(served: tuple[str, Reference]) -> None:
    folder, reference = served
    (prefix,) = prompts_of([40], seed=1)
    prompts = [
        prefix[:length] + tail for length, tail in zip((40, 33, 40), prompts_of([9, 3, 1], 2), strict=True)
    ]
    with LLM(folder, device="cpu", dtype="float32", block_size=8, num_kv_blocks=64) as llm:
        scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
        check(llm.generate([prefix], GREEDY), reference)
        assert scheduler.blocks.num_hit_tokens == 0
        check(llm.generate(prompts, GREEDY), reference)
        assert scheduler.blocks.num_hit_tokens == 40 + 32 + 40


@pytest.mark.parametrize("num_host_kv_blocks", [0, 64], ids=["recomputed", "swapped"])
def test_preempted_sequences_keep_the_tokens(
    kind: str, served: tuple[str, Reference], num_host_kv_blocks: int
) -> None:
    folder, reference = served
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        block_size=4,
        num_kv_blocks=SCARCE_BLOCKS[kind],
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefix_caching=False,
    ) as llm:
        scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
        scheduler._state.costs.swap_blocks_per_s = 1e9  # swap whenever there is host memory
        check(llm.generate(prompts_of([17, 22, 9, 13], seed=3), GREEDY), reference)
        assert scheduler.stats.num_preemptions > 0
        assert (scheduler.blocks.num_swapped_blocks > 0) == (num_host_kv_blocks > 0)
