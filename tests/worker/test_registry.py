"""Which models and sizes are refused, and in which words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.proto.errors import ConfigError
from quire.worker.models.registry import check_supported

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def model(make_model: Any, engine_config: Any) -> Any:
    return engine_config(make_model("llama")).model


def changed(model: Any, **settings: Any) -> Any:
    return replace(model, hf=model.hf | settings)


def test_an_unknown_architecture_is_named_with_the_known_ones(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"'BloomForCausalLM' is not supported; supported: LlamaForCausalLM, "
    ):
        check_supported(replace(model, architecture="BloomForCausalLM"), 1)


@pytest.mark.parametrize(
    ("size", "words"), [(3, "attention heads, 8"), (8, "KV heads, 4"), (0, "at least 1")]
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(model: Any, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_supported(model, size)


def test_an_intermediate_size_that_does_not_divide(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 4 does not divide its intermediate_size, 130"
    ):
        check_supported(changed(model, intermediate_size=130), 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 100}, "sliding window of 100 tokens .* at most 100"),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq\)"),
    ],
)
def test_features_that_are_not_computed_are_refused_by_name(
    model: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_supported(changed(model, **settings), 1)


def test_a_window_that_never_matters_is_no_obstacle(model: Any) -> None:
    check_supported(changed(model, sliding_window=256), 1)
    check_supported(changed(model, sliding_window=100, use_sliding_window=False), 1)


def test_old_and_new_spellings_of_rope_mean_the_same(model: Any) -> None:
    new = changed(model, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    old = changed(model, rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    assert check_supported(new, 1).rope == check_supported(old, 1).rope


def test_llama3_frequencies_equal_transformers(model: Any) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = LLAMA3_ROPE | {"rope_theta": 5e5}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=settings)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rope = check_supported(changed(model, rope_parameters=settings), 1).rope
    torch.testing.assert_close(torch.tensor(rope.inverse_frequencies(128)), expected)


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, quire.worker.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
