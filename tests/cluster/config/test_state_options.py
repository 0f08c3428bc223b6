"""Options of models whose layers keep states: the slots that memory has room for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from state_kinds import STATE_KINDS
from vision_kinds import VISION_KINDS
from vision_models import save_model

from quire.cluster.config import early_checks
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.model_config import describe_model
from quire.cluster.config.resolve import resolve
from quire.proto.cache_groups import make_layout
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.proto.model.registry import check_supported, state_layers
from quire.proto.model.state import StateLayers, state_bytes
from quire.proto.state_memory import choose_num_slots

MIB = 1 << 20


@pytest.fixture
def resolved(make_model: Callable[..., Path]) -> Callable[..., EngineConfig]:
    folder = make_model("lfm2", **STATE_KINDS["lfm2"])

    def resolve_with(**options: Any) -> EngineConfig:
        defaults: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "skip_tokenizer_init": True}
        return resolve(EngineOptions(str(folder), **(defaults | options)), Machine(4, 0))

    return resolve_with


def test_states_of_sequences_take_half_of_the_memory_at_most() -> None:
    assert choose_num_slots("it", 100, MIB, 0, 20 * MIB) == 10 + 10  # no KV: snapshots take the rest
    kv_bytes = 1 << 40
    assert choose_num_slots("it", 100, MIB, kv_bytes, 20 * MIB) == 10 + 2
    assert choose_num_slots("it", 4, MIB, kv_bytes, 45 * MIB) == 5 + 10
    assert choose_num_slots("it", 1, MIB, 0, 1000 * MIB) == 2 + 16


def test_state_that_fits_nowhere_is_refused_with_the_sizes() -> None:
    expected = (
        "it: a sequence's state takes 75.4 MiB per rank, and KV memory is 64 MiB; at least 302 MiB are needed"
    )
    with pytest.raises(ConfigError, match=expected):
        choose_num_slots("it", 4, int(75.4 * MIB), 0, 64 * MIB)


def test_slots_are_those_of_the_memory_or_as_given(resolved: Callable[..., EngineConfig]) -> None:
    config = resolved()
    own = state_bytes(state_layers(config.model, 1), 4)
    slots = config.cache.num_state_slots
    assert config.model.has_states
    assert slots is not None
    assert slots >= 1 + 4
    assert slots * own < 512 * MIB
    assert resolved(num_state_slots=7).cache.num_state_slots == 7
    assert resolved(num_kv_blocks=64).cache.num_state_slots == 9
    with pytest.raises(ConfigError, match=r"a sequence's state takes .* per rank, and KV memory is"):
        resolved(kv_cache_memory=own)


def test_recurrent_states_in_bfloat16_take_half_of_the_memory(make_model: Callable[..., Path]) -> None:
    """Those of convolutions have the model's type."""
    folder = make_model("mamba", **STATE_KINDS["mamba"])

    def layers(dtype: str) -> StateLayers:
        options = EngineOptions(
            str(folder), device="cpu", mamba_ssm_cache_dtype=dtype, skip_tokenizer_init=True
        )
        return state_layers(resolve(options, Machine(4, 0)).model, 1)

    wide, narrow = layers("auto"), layers("bfloat16")
    elements = sum(prod(tensor.shape) for layer in narrow for tensor in layer if tensor.is_recurrent)
    assert state_bytes(wide, 4) - state_bytes(narrow, 4) == 2 * elements > 0
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype"):
        layers("float8")


def test_summary_names_the_slots(resolved: Callable[..., EngineConfig]) -> None:
    summary = resolved(num_kv_blocks=64, num_state_slots=12).summary
    assert "state slots for 4 sequences and 7 snapshots" in summary
    assert (
        "state slots for 2 sequences and 0 snapshots" in resolved(num_kv_blocks=64, num_state_slots=3).summary
    )


def test_data_parallel_attention_needs_latents(
    resolved: Callable[..., EngineConfig], make_model: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="enable_dp_attention is for multi-head latent attention"):
        resolved(enable_dp_attention=True, tensor_parallel_size=2)
    folder = make_model("kimi_linear", **STATE_KINDS["kimi_linear"])
    options = EngineOptions(
        str(folder), device="cpu", max_num_seqs=4, tensor_parallel_size=2, enable_dp_attention=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    config = resolve(options, Machine(4, 0))
    assert config.parallel.num_kv_partitions == 2
    assert config.cache.num_state_slots is not None


def test_models_with_states_may_draft(resolved: Callable[..., EngineConfig]) -> None:
    assert resolved().drafts_jump_forward
    config = resolved(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    assert config.speculative is not None
    assert config.max_decode_tokens == 4 * 4


def test_draft_model_with_states_is_refused(
    resolved: Callable[..., EngineConfig], make_model: Callable[..., Path]
) -> None:
    folder = make_model("lfm2", **STATE_KINDS["lfm2"])
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM, whose layers keep a state"):
        resolved(speculative_config=f'{{"model": "{folder}", "num_speculative_tokens": 3}}')


def test_early_check_of_memory_counts_no_layers_with_states(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the three layers of the model one has keys and values; all would not fit."""
    folder = make_model("lfm2", **STATE_KINDS["lfm2"])
    config = describe_model(folder, "it")
    ((_, num_heads, dim),) = set(config.kv_shapes(1))
    block_bytes = 2 * 16 * num_heads * dim * 4
    monkeypatch.setattr(early_checks, "available_bytes", lambda: 2 * 100 * block_bytes)
    early_checks.check_early(
        EngineOptions(str(folder), device="cpu", num_kv_blocks=100, skip_tokenizer_init=True), Machine(4, 0)
    )


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("deepseek_v4", {"block_size": 1}, "block_size is 1, which has no room for the vectors"),
        ("deepseek_v4", {"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support DeepseekV4ForCausalLM"),
        ("deepseek_v4", {"enable_dp_attention": True, "tensor_parallel_size": 2}, "enable_dp_attention"),
        ("deepseek_v4", {"pipeline_parallel_size": 2}, "pipeline_parallel_size does not support"),
        (
            "deepseek_v4",
            {"speculative_config": {"method": "mtp"}},
            "'mtp' does not support Deepseek",
        ),
        (
            "qwen4_exp_text",
            {"block_size": 2},
            "block_size is 2, which has no room for the mean keys of 4 tokens",
        ),
        ("qwen4_exp_text", {"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support Qwen4ExpForCausalLM"),
        (
            "qwen4_exp_text",
            {"enable_dp_attention": True, "tensor_parallel_size": 2},
            "enable_dp_attention is",
        ),
        ("qwen4_exp_text", {"pipeline_parallel_size": 2}, "pipeline_parallel_size does not support"),
        ("qwen4_exp_text", {"tensor_parallel_size": 8}, "8 does not divide the 4 value heads"),
        (
            "qwen4_exp_text",
            {"device": "cuda", "batch_invariant": True},
            "batch_invariant does not support sparse",
        ),
        (
            "qwen4_exp_text",
            {"speculative_config": {"method": "mtp"}},
            "'mtp' does not support Qwen4Exp",
        ),
        ("glm5_next_text", {"block_size": 6}, r"block_size is 6, must divide the 4 tokens of its pools"),
        ("glm5_next_text", {"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support Glm5NextForCausalLM"),
        ("glm5_next_text", {"enable_dp_attention": True, "tensor_parallel_size": 2}, "enable_dp_attention"),
        ("glm5_next_text", {"pipeline_parallel_size": 2}, "pipeline_parallel_size does not support"),
        ("glm5_next_text", {"speculative_config": {"method": "mtp"}}, "'mtp' does not support Glm5Next"),
        ("zaya", {"enable_lora": True}, "enable_lora does not support ZayaForCausalLM"),
        ("zaya", {"pipeline_parallel_size": 2}, "pipeline_parallel_size does not support"),
        ("hy_v4", {"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support HYV4ForCausalLM"),
        ("hy_v4", {"pipeline_parallel_size": 2}, "pipeline_parallel_size does not support"),
    ],
)
def test_options_without_ops_for_compressed_tokens_or_sinks_are_refused(
    kind: str, options: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    folder = make_model(kind, **STATE_KINDS.get(kind, {}))
    defaults: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=words):
        resolve(EngineOptions(str(folder), **(defaults | options)), Machine(8, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, must be 1"),
        ({"indexer_budget": None}, "lacks 'indexer_budget'"),
        ({"indexer_budget": 10}, "indexer_budget is 10 and indexer_compress_ratio 4"),
        ({"indexer_head_dim": 3}, "indexer_head_dim and indexer_n_heads are 3 and 16"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not supported"),
        ({"ple_layer_ids": [2]}, "ple_layer_ids has 2, a layer of attention"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids has 4, but there are 3 layers"),
        ({"eos_token_id": None}, "lacks 'eos_token_id', which separates n-grams"),
        ({"ple_embed_dim": 50}, "ple_embed_dim is 50, must be a multiple of the 4 hashes"),
        ({"ngram_size": 1}, "ngram_size, heads_per_ngram, .* are 1, 2"),
        (
            {"ple_embed_dim": 8},
            "the 2 columns of its table of n-grams are too few for a tensor_parallel_size of 4",
        ),
    ],
)
def test_fields_of_qwen4_that_are_not_supported_are_refused(
    settings: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    model = describe_model(make_model("qwen4_exp_text", seed=7, **STATE_KINDS["qwen4_exp_text"]), "it")
    with pytest.raises(ConfigError, match=words):
        check_supported(replace(model, hf=model.hf | settings), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support MiniMaxM3VLForCausalLM"),
        (
            {"enable_dp_attention": True, "tensor_parallel_size": 2},
            "enable_dp_attention is for multi-head latent",
        ),
        ({"device": "cuda", "batch_invariant": True}, "batch_invariant does not support sparse attention"),
    ],
)
def test_options_that_chosen_blocks_do_not_support_are_refused(
    options: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    folder = make_model("minimax_m3_vl_text")
    defaults: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=words):
        resolve(EngineOptions(str(folder), **(defaults | options)), Machine(4, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"index_n_heads": 2}, "index_n_heads is 2, must be the number of KV heads, 4"),
        ({"index_head_dim": 8}, "index_head_dim is 8, must be even and at least 16"),
        (
            {"index_local_blocks": 3},
            "index_local_blocks, index_topk_blocks and index_block_size are 3, 2 and 16",
        ),
        ({"layer_types": ["other"] * 3}, "layers of type 'other' are not supported"),
    ],
)
def test_indexer_of_blocks_that_cannot_be_read_raises(
    settings: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    model = describe_model(make_model("minimax_m3_vl_text"), "it")
    with pytest.raises(ConfigError, match=words):
        check_supported(replace(model, hf=model.hf | settings), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"index_kpool": 3}, "index_kpool is 3, must be at least 2 and divide index_topk, 8"),
        ({"index_kpool": 1}, "index_kpool is 1, must be at least 2"),
        ({"index_kpool_always_select_tail": False}, "attention to whole pools alone"),
        ({"index_head_dim": 64}, "index_head_dim is 64, must be at most kv_lora_rank, 48"),
        (
            {"indexer_types": ["full", "shared", "full"]},
            "layer 1 shares an indexer .*, but the layer before it has none of its own",
        ),
        (
            {"indexer_types": ["full", "shared", "shared"], "layer_types": ["indexed_attention"] * 3},
            "layer 2 shares an indexer",
        ),
        ({"layer_types": ["other"] * 3}, "layer_types is .'other', .*, must name 'linear_attention' or"),
    ],
)
def test_indexer_of_pools_that_cannot_be_read_raises(
    settings: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    model = describe_model(make_model("glm5_next_text", **STATE_KINDS["glm5_next_text"]), "it")
    with pytest.raises(ConfigError, match=words):
        check_supported(replace(model, hf=model.hf | settings), 1)


@pytest.fixture(scope="module")
def large4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Mistral Large 4, whose first layer's latent has keys of three indexers behind it."""
    folder = tmp_path_factory.mktemp("mistral_large4")
    save_model(VISION_KINDS["mistral_large4"], folder, seed=0)
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype does not support MistralLarge4ForCausalLM"),
        ({"pipeline_parallel_size": 2}, "layers share the keys and values of others"),
        ({"speculative_config": {"method": "mtp"}}, "has no heads for it"),
    ],
)
def test_options_that_shared_latents_do_not_support_are_refused(
    options: dict[str, Any], words: str, large4: Path
) -> None:
    defaults: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=words):
        resolve(EngineOptions(str(large4), **(defaults | options)), Machine(4, 0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_source_layers": [0, 0, 0, 0, 0, 0]}, "layer 2 shares the latents of layer 0"),
        ({"kv_source_layers": [0, 1, 2, 0, 2, 0]}, None),
        ({"kv_source_layers": [0, 1, 2, 1, 2, 0]}, "layer 5 shares the latents of layer 0"),
        ({"kv_source_layers": [0, 0, 2]}, "kv_source_layers has 3 entries, no_rope_layers 6"),
        ({"indexer_types": ["shared"] * 6}, "and 'full' for the first"),
    ],
)
def test_latents_that_a_layer_cannot_share_are_refused(
    settings: dict[str, Any], words: str | None, large4: Path
) -> None:
    model = describe_model(large4, "it")
    model = replace(model, hf=model.hf | settings)
    if words is None:
        check_supported(model, 1)
        return
    with pytest.raises(ConfigError, match=words):
        check_supported(model, 1)


def test_keys_of_all_indexers_stand_behind_the_latent_that_their_layers_share(large4: Path) -> None:
    model = describe_model(large4, "it")
    hf = model.hf
    token = hf["kv_lora_rank"] + hf["qk_rope_head_dim"] + 3 * hf["index_head_dim"]
    assert model.kv_shapes(4) == [(1, 1, token)] * 2


def test_million_tokens_of_compressed_attention_take_the_memory_of_their_entries(tmp_path: Path) -> None:
    """The sizes are those of DeepSeek-V4-Flash, which transformers has as defaults."""
    from transformers import DeepseekV4Config

    fields = DeepseekV4Config().to_dict()
    architecture = {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields | architecture))
    model = describe_model(tmp_path, "it")
    layout = make_layout(model.num_kv_layers, model.layer_windows, 1 << 20, 0, model.kv_sizes(1))
    slots = layout.layers_per_block * layout.num_slots(1 << 20)
    assert (model.num_kv_layers, layout.layers_per_block) == (43 + 8, 8)
    assert slots * prod(model.kv_shape(1)) * 2 == pytest.approx(8 << 30, rel=0.01)
    assert state_bytes(state_layers(model, 8), 2) == 2 * (20 * 7 * (2048 + 512) + 23 * 127 * 1024)
