"""check_supported: specs of supported models, and errors for unsupported models and sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from narrowing import instance_of, not_none

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.proto.errors import ConfigError
from quire.proto.model.attention import AttentionSpec
from quire.proto.model.mla import MlaSpec
from quire.proto.model.registry import check_supported
from quire.proto.model.spec import DecoderSpec

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


def spec_of(model: Any, tensor_parallel_size: int = 1) -> DecoderSpec:
    return instance_of(DecoderSpec, check_supported(model, tensor_parallel_size))


def with_architecture(architecture: str, model_type: str, model: Any, **settings: Any) -> Any:
    """Return the model with an architecture that quire serves with transformers' modules."""
    return replace(changed(model, model_type=model_type, **settings), architecture=architecture)


@pytest.mark.parametrize(
    ("architecture", "model_type", "words"),
    [
        ("T5ForConditionalGeneration", "t5", "encoder and a decoder"),
        ("RwkvForCausalLM", "rwkv", "recurrent state"),
        ("XGLMForCausalLM", "xglm", "does not go through transformers' attention interface"),
        ("DiffLlamaForCausalLM", "diffllama", "its layers attend twice"),
        ("BertForMaskedLM", "bert", "has no causal language model of that name"),
        ("NeverForCausalLM", "never", "has no causal language model of that name"),
        ("JetMoeForCausalLM", "jetmoe", "keys and values of other shapes"),
    ],
)
def test_unsupported_architecture_raises_with_reason(
    model: Any, architecture: str, model_type: str, words: str
) -> None:
    settings: dict[str, Any] = {}
    if model_type == "t5":
        settings["is_encoder_decoder"] = True
    with pytest.raises(ConfigError, match=rf"architecture '{architecture}' is not supported: .*{words}"):
        check_supported(with_architecture(architecture, model_type, model, **settings), 1)


@pytest.mark.parametrize(
    ("architecture", "model_type", "words"),
    [
        ("GPT2LMHeadModel", "gpt2", "has no tensor-parallel plan"),
        ("BloomForCausalLM", "bloom", "has no tensor-parallel plan"),
        ("FlexOlmoForCausalLM", "flex_olmo", "needs 'colwise_gather_output' in its tensor-parallel plan"),
    ],
)
def test_architecture_without_plan_supports_one_rank_only(
    model: Any, architecture: str, model_type: str, words: str
) -> None:
    named = with_architecture(architecture, model_type, model)
    check_supported(named, 1)
    with pytest.raises(ConfigError, match=f"{words}: tensor_parallel_size must be 1, not 2"):
        check_supported(named, 2)


def test_ranks_must_divide_kv_heads_of_transformers_model(model: Any) -> None:
    named = with_architecture("OlmoForCausalLM", "olmo", model)
    check_supported(named, 4)
    with pytest.raises(ConfigError, match="8 does not divide its KV heads, 4"):
        check_supported(named, 8)


def test_longrope_of_transformers_model_raises_beyond_original_context(model: Any) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    named = with_architecture("OlmoForCausalLM", "olmo", model, rope_parameters=rope)
    check_supported(replace(named, max_model_len=128), 1)
    with pytest.raises(ConfigError, match="longest sequence; give a max_model_len of at most 128"):
        check_supported(named, 1)


@pytest.mark.parametrize(
    ("fields", "size", "words"),
    [
        ({}, 3, "3 does not divide its attention heads, 8"),
        ({}, 0, "must be at least 1"),
        ({"num_kv_heads": 3}, 1, "8 attention heads cannot share 3 KV heads"),
        ({"num_kv_heads": 0}, 1, "8 attention heads cannot share 0 KV heads"),
        ({"num_kv_heads": -1}, 1, "8 attention heads cannot share -1 KV heads"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, "neither divides its KV heads, 4, nor is a multiple"),
        ({"vocab_size": 9}, 8, "vocab_size, 9, is too small for a tensor_parallel_size of 8"),
    ],
)
def test_sizes_that_cannot_be_sharded_raise(
    model: Any, fields: dict[str, int], size: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_supported(replace(model, **fields), size)


@pytest.mark.parametrize(
    "settings",
    [
        {"query_pre_attn_scalar": -1},
        {"logits_scaling": 0},
        {"layer_types": 5},
        {"rope_parameters": "yarn"},
        {"residual_multiplier": "x"},
        {"rms_norm_eps": [1]},
        {"intermediate_size": [64]},
        {"intermediate_size": 64.5},
        {"intermediate_size": 1 << 31},
        {"attention_multiplier": float("inf")},
    ],
)
def test_invalid_settings_raise(model: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"its config\.json has invalid settings"):
        check_supported(changed(model, **settings), 1)


def test_more_ranks_than_kv_heads_replicate_heads(model: Any) -> None:
    config = engine_config(EngineOptions("many-ranks", tensor_parallel_size=8), model)
    assert instance_of(AttentionSpec, spec_of(model, 8).layers[0].mixer).num_kv_heads == 4
    assert config.model.kv_shape(config.parallel.tensor_parallel_size)[1] == 1


def test_intermediate_size_need_not_divide(model: Any) -> None:
    check_supported(changed(model, intermediate_size=130), 4)
    with pytest.raises(ConfigError, match=r"intermediate_size, 9, is too small"):
        check_supported(changed(model, intermediate_size=9), 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks 'factor'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "lack layers of type 'full_att",
        ),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported, only 'silu'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layers of type 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "describes 1 layers and has 3"),
        ({"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_unsupported_feature_raises_and_is_named(model: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_supported(changed(model, **settings), 1)


def test_fields_of_another_family_have_no_effect(model: Any) -> None:
    stray = changed(model, num_kv_shared_layers=3, hidden_size_per_layer_input=8, altup_num_inputs=[3])
    assert spec_of(stray) == spec_of(model)


def test_gemma_3n_without_inputs_of_layers_raises(make_model: Any, engine_config: Any) -> None:
    gemma = engine_config(make_model("gemma3n_text")).model
    with pytest.raises(ConfigError, match=r"PerLayerInputs\.size is None, must be a whole number"):
        check_supported(changed(gemma, hidden_size_per_layer_input=None), 1)


def windows(model: Any, **settings: Any) -> list[int]:
    layers = spec_of(changed(model, **settings)).layers
    return [instance_of(AttentionSpec, layer.mixer).window for layer in layers]


def test_read_spec_gives_window_to_sliding_layers_only(make_model: Any, engine_config: Any) -> None:
    mistral = engine_config(make_model("mistral")).model
    assert windows(mistral, sliding_window=100) == [100, 100, 100]
    assert windows(mistral, sliding_window=256) == [0, 0, 0], "no sequence exceeds the window"
    qwen2 = engine_config(make_model("qwen2")).model
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(qwen2, sliding_window=64, use_sliding_window=True, layer_types=kinds) == [0, 64, 0]
    assert windows(qwen2, sliding_window=64, use_sliding_window=False, layer_types=kinds) == [0, 0, 0]


def test_read_spec_selects_layers_with_experts(make_model: Any, engine_config: Any) -> None:
    model = engine_config(make_model("qwen3_moe")).model

    def sparse(**settings: Any) -> list[bool]:
        return [layer.has_experts for layer in spec_of(changed(model, **settings)).layers]

    assert sparse() == [True, True, True]
    assert sparse(mlp_only_layers=[0]) == [False, True, True]
    assert sparse(decoder_sparse_step=2) == [False, True, False]
    with pytest.raises(ConfigError, match="num_experts_per_tok is 7, but it has 6 experts"):
        sparse(num_experts_per_tok=7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"q_lora_rank": None}, "lacks 'q_lora_rank'"),
        ({"index_topk": None}, "lacks 'index_topk'"),
        ({"index_topk": 0}, "index_topk is 0, must be at least 1"),
        ({"index_n_heads": 0}, "index_n_heads is 0, must be at least 1"),
        ({"index_head_dim": 8}, "index_head_dim is 8, must be at least 16"),
        ({"index_head_dim": "wide"}, "invalid settings"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "and 'full' for the first"),
        ({"indexer_types": ["full", "full"]}, "for each of 4 layers"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "must name 'full' or 'shared'"),
    ],
)
def test_indexer_that_cannot_be_read_raises(
    make_model: Any, engine_config: Any, settings: dict[str, Any], words: str
) -> None:
    sparse = engine_config(make_model("glm_moe_dsa")).model
    with pytest.raises(ConfigError, match=words):
        check_supported(changed(sparse, **settings), 1)


def test_rotation_of_indexer_is_that_of_the_configuration(make_model: Any, engine_config: Any) -> None:
    for kind, is_interleaved in (("deepseek_v32", False), ("glm_moe_dsa", True)):
        sparse = engine_config(make_model(kind)).model
        for settings, expected in (
            ({}, is_interleaved),
            ({"indexer_rope_interleave": not is_interleaved}, not is_interleaved),
        ):
            mla = instance_of(MlaSpec, spec_of(changed(sparse, **settings)).layers[0].mixer)
            assert not_none(mla.indexer).interleaved == expected


def test_rope_scaling_and_rope_parameters_give_same_ropes(model: Any) -> None:
    new = changed(model, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    old = changed(model, rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    assert spec_of(new).ropes == spec_of(old).ropes


def test_registry_imports_no_torch() -> None:
    code = "import sys, quire.proto.model.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0
