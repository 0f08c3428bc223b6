"""LLM with weights that are quantized at load, or stored quantized."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from narrowing import not_none
from quantized_models import Scheme, write_quantized

from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.errors import ConfigError

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def mean_nats(quantization: str | None) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM("demo", device="cpu", num_kv_blocks=64, quantization=quantization) as llm:
        (result,) = llm.generate(TEXT, params)
    assert result.prompt_logprobs is not None
    pairs = zip(not_none(result.prompt_token_ids)[1:], result.prompt_logprobs[1:], strict=True)
    return -math.fsum(entry[token].logprob for token, entry in pairs if entry) / len(
        not_none(result.prompt_token_ids)
    )


def test_eight_bit_weights_are_close_to_full_precision() -> None:
    exact = mean_nats(None)
    for quantization in ("int8", "fp8"):
        assert 0 < abs(mean_nats(quantization) - exact) < 0.05


@pytest.mark.parametrize("layout", ["gptq", "awq", "packed"])
def test_four_bit_checkpoint_needs_no_option(layout: str, demo_model_dir: Path, tmp_path: Path) -> None:
    quantized, twin = write_quantized(demo_model_dir, tmp_path, Scheme(layout, group_len=64))
    tokens = []
    for folder in (quantized, twin):
        with LLM(str(folder), device="cpu", num_kv_blocks=64) as llm:
            tokens.append([result.outputs[0].token_ids for result in llm.generate([TEXT, "A"], GREEDY)])
    assert tokens[0] == tokens[1]


def test_invalid_quantization_is_refused_before_anything_starts(demo_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3', must be int8 or fp8"):
        EngineOptions("demo", quantization="int3")
    quantized, _ = write_quantized(demo_model_dir, tmp_path, Scheme("awq", group_len=64))
    with pytest.raises(ConfigError, match=r"quantized already \(awq\)"):
        resolve(EngineOptions(str(quantized), quantization="fp8"), Machine.this())
