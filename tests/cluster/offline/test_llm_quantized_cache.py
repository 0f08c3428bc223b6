"""LLM with a quantized KV cache: number of blocks, and swapping."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.proto.errors import ConfigError

PROMPTS = [
    "It was a bright cold morning",
    "The old man and his dog",
    "A letter had come",
    "What could it mean?",
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
KV_CACHE_DTYPES = ["int8", "fp8_e4m3"]


def generate_tokens(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_swapped_blocks_keep_their_scales(kv_cache_dtype: str) -> None:
    with LLM("demo", device="cpu", kv_cache_dtype=kv_cache_dtype, block_size=4, num_kv_blocks=200) as roomy:
        expected = generate_tokens(roomy)
    assert all(len(set(tokens)) > 8 for tokens in expected)
    with LLM(
        "demo",
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        block_size=4,
        num_kv_blocks=20,
        num_host_kv_blocks=64,
        prefix_caching=False,
    ) as tight:
        scheduler = tight._engine.scheduler  # type: ignore[attr-defined]
        scheduler._state.costs.swap_blocks_per_s = 1e9  # swap instead of recomputing
        assert generate_tokens(tight) == expected
        assert scheduler.blocks.num_swapped_blocks > 0


def test_quantized_cache_has_more_blocks_in_the_same_memory() -> None:
    counts = []
    for kv_cache_dtype in ("auto", *KV_CACHE_DTYPES):
        with LLM("demo", device="cpu", kv_cache_dtype=kv_cache_dtype, kv_cache_memory=8 << 20) as llm:
            counts.append(llm.config.cache.num_kv_blocks or 0)
    full, *quantized = counts
    # A quarter of float32, and one scale per vector.
    assert all(3 * full < count < 4 * full for count in quantized)


def test_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is 'int4', must be auto, fp8_e4m3, fp8_per_tensor or int8"
    ):
        LLM("demo", kv_cache_dtype="int4")
