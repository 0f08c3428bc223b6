"""describe_model reads the sizes that architectures name differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.cluster.config.model_config import describe_model
from quire.proto.errors import ConfigError, ModelLoadError


@pytest.fixture
def describe(tmp_path: Path) -> Any:
    def of(kind: str, architecture: str, **fields: Any) -> Any:
        config = transformers.AutoConfig.for_model(kind, **fields)
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        return describe_model(tmp_path, "it")

    return of


@pytest.mark.parametrize(
    ("kind", "architecture", "fields", "num_kv_heads", "head_dim", "context_len"),
    [
        ("gpt2", "GPT2LMHeadModel", {"n_head": 6, "n_embd": 48, "n_positions": 99}, 6, 8, 99),
        ("bloom", "BloomForCausalLM", {"n_head": 6, "hidden_size": 48}, 6, 8, 2048),
        ("bloom", "BloomForCausalLM", {"n_head": 6, "hidden_size": 48, "seq_length": 512}, 6, 8, 512),
        ("falcon", "FalconForCausalLM", {"num_attention_heads": 6, "hidden_size": 48}, 1, 8, 2048),
        (
            "falcon",
            "FalconForCausalLM",
            {"num_attention_heads": 6, "hidden_size": 48, "multi_query": False, "num_kv_heads": 2},
            6,
            8,
            2048,
        ),
        (
            "falcon",
            "FalconForCausalLM",
            {
                "num_attention_heads": 6,
                "hidden_size": 48,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
            },
            2,
            8,
            2048,
        ),
        ("gemma3_text", "Gemma3ForCausalLM", {"max_position_embeddings": 300}, 4, 256, 300),
        ("mixtral", "MixtralForCausalLM", {"max_position_embeddings": 300}, 8, 128, 300),
    ],
)
def test_describe_model_reads_heads_and_context_length(
    describe: Any,
    kind: str,
    architecture: str,
    fields: dict[str, Any],
    num_kv_heads: int,
    head_dim: int,
    context_len: int,
) -> None:
    model = describe(kind, architecture, **fields)
    assert (model.num_kv_heads, model.head_dim, model.max_model_len) == (num_kv_heads, head_dim, context_len)


def test_yarn_extends_the_context(describe: Any) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000, "rope_theta": 1e4}
    model = describe("qwen2", "Qwen2ForCausalLM", max_position_embeddings=1000, rope_parameters=rope)
    assert model.max_model_len == 4000


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("t5", "T5ForConditionalGeneration", "encoder and a decoder"),
        ("rwkv", "RwkvForCausalLM", "recurrent state"),
        ("xglm", "XGLMForCausalLM", "does not go through transformers' attention interface"),
        ("jetmoe", "JetMoeForCausalLM", "keys and values of other shapes"),
    ],
)
def test_unsupported_architecture_is_refused_before_its_sizes_are_read(
    describe: Any, kind: str, architecture: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{architecture}' is not supported: .*{words}"):
        describe(kind, architecture)


def test_negative_size_raises_model_load_error(describe: Any) -> None:
    with pytest.raises(ModelLoadError, match="seq_length is -5, must be from 1 to 134217728"):
        describe("bloom", "BloomForCausalLM", seq_length=-5)


def test_layers_that_differ_are_cached_in_their_own_sizes(describe: Any) -> None:
    model = describe(
        "gemma4_text",
        "Gemma4ForCausalLM",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_key_value_heads=4,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=2,
    )
    assert model.kv_layers == ((4, 16), (1, 32)) * 2
    assert model.num_kv_layers == 4
    assert model.kv_shapes(2) == [(2, 2, 16), (2, 1, 32)] * 2


@pytest.mark.parametrize("architectures", [5, True, {"a": 1}])
def test_architectures_that_are_not_a_list_raise_model_load_error(tmp_path: Path, architectures: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": architectures}))
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        describe_model(tmp_path, "it")


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_rope_scaling_extends_the_context(describe: Any, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 2.5, "rope_theta": 1e4}
    model = describe("llama", "LlamaForCausalLM", max_position_embeddings=1000, rope_parameters=rope)
    assert model.max_model_len == 2500


def test_base_that_depends_on_the_batch_does_not_extend_the_context(describe: Any) -> None:
    """OLMo is served with transformers' modules, whose dynamic base is that of the longest sequence."""
    for rope_type, context_len in (("dynamic", 1000), ("linear", 2500)):
        rope = {"rope_type": rope_type, "factor": 2.5, "rope_theta": 1e4}
        model = describe("olmo", "OlmoForCausalLM", max_position_embeddings=1000, rope_parameters=rope)
        assert model.max_model_len == context_len


def test_contexts_per_layer_type_are_extended_already(describe: Any) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    model = describe(
        "gemma3_text",
        "Gemma3ForCausalLM",
        max_position_embeddings=8000,
        rope_parameters={"full_attention": full, "sliding_attention": sliding},
    )
    assert model.max_model_len == 8000


def test_yarn_factor_that_is_not_a_number_raises_model_load_error(describe: Any) -> None:
    rope = {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 1000, "rope_theta": 1e4}
    with pytest.raises(ModelLoadError, match="rope_parameters cannot be read"):
        describe("qwen2", "Qwen2ForCausalLM", rope_parameters=rope)
