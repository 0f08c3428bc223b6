"""Layers that keep a state: logits equal transformers' at any chunk length, in mixed batches, on several ranks."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import model_type_of
from published_checkpoints import CHECKPOINTS, write_published
from quantized_models import SCHEMES, Scheme, write_quantized
from quick_cases import diagonal, slow_except
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS
from state_models import StateModel

from quire.cluster.config.model_config import describe_model
from quire.proto.errors import ConfigError
from quire.proto.model.registry import NO_KV, check_supported, state_layers
from quire.proto.model.state import state_bytes

# float32 logits differ from those of transformers by up to 5e-5 of the largest one.
TOLERANCE = 2e-4
# Random weights make some models sensitive: transformers' float32 logits differ from its float64 ones by 5e-4.
SENSITIVE = {"zamba2-two-blocks": 2e-3, "zamba-eight-heads": 2e-3}
# Groups that divide the 48 numbers of latents, and the 40 of DeepSeek-V4.
_SCHEMES = SCHEMES | {
    "packed-groups-of-16": Scheme("packed", group_len=16),
    "packed-groups-of-8": Scheme("packed", group_len=8, symmetric=True),
}
LENGTHS, CHUNK_LENS, NUM_DECODES = [13, 30, 3, 41], [5, 7, 1, 41], 4


@pytest.fixture(scope="module")
def references(make_model: Any) -> Any:
    """`references(kind) -> folder, logits of each prompt in transformers`; cached."""
    made: dict[str, tuple[Path, list[torch.Tensor]]] = {}

    def reference(kind: str) -> tuple[Path, list[torch.Tensor]]:
        if kind not in made:
            folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
            model = Reference(folder).model
            with torch.inference_mode():
                logits = [
                    model(torch.tensor([prompt]), use_cache=False).logits[0]
                    for prompt in prompts_of(LENGTHS, seed=1)
                ]
            made[kind] = folder, logits
        return made[kind]

    return reference


# `make test` runs the variants on one rank or on two, in turns, and each family on both.
CASES = list(product(STATE_KINDS, (1, 2, 4)))
QUICK = [
    *((kind, tp) for kind in STATE_KINDS if "-" not in kind for tp in (1, 2)),
    *zip((kind for kind in STATE_KINDS if "-" in kind), cycle((1, 2))),
]


@pytest.mark.parametrize(("kind", "tp"), slow_except(QUICK, CASES))
def test_logits_equal_transformers(kind: str, tp: int, references: Any) -> None:
    folder, expected = references(kind)
    model = StateModel(folder, tp)
    found = model.compute(prompts_of(LENGTHS, seed=1), CHUNK_LENS, NUM_DECODES)
    tolerance = SENSITIVE.get(kind, TOLERANCE)
    for own, theirs in zip(found, expected, strict=True):
        assert (own - theirs).abs().max() < tolerance * theirs.abs().max()


# Formats whose groups of inputs the ranks divide.
@pytest.mark.parametrize(
    ("kind", "scheme", "tp"),
    [
        ("lfm2", "packed", 1),
        ("qwen3_next", "float8", 2),
        ("qwen3_next", "gptq", 1),
        ("qwen3_5_text-one-key-head", "awq", 2),
        ("granitemoehybrid-dense", "packed-symmetric", 2),
        ("falcon_h1", "int8", 1),
        ("jamba-dense", "int8", 2),
        ("kimi_linear", "int8", 2),
        ("kimi_linear", "packed-groups-of-16", 1),
        ("minimax", "float8", 2),
        ("deepseek_v4", "int8", 2),
        ("deepseek_v4", "packed-groups-of-8", 1),
        ("qwen4_exp_text", "int8", 2),
        ("qwen4_exp_text-no-ngrams", "float8", 1),
        ("glm5_next_text", "packed-groups-of-8", 1),
        ("glm5_next_text", "int8", 2),
        ("zaya", "int8", 2),
        ("zaya", "packed-groups-of-8", 1),
    ],
)
def test_quantized_checkpoint_equals_its_dequantized_twin(
    kind: str, scheme: str, tp: int, references: Any, tmp_path: Path
) -> None:
    folder, _ = references(kind)
    quantized, twin = write_quantized(folder, tmp_path, _SCHEMES[scheme])
    prompts = prompts_of(LENGTHS, seed=1)
    found, expected = (
        StateModel(each, tp).compute(prompts, CHUNK_LENS, NUM_DECODES) for each in (quantized, twin)
    )
    for own, theirs in zip(found, expected, strict=True):
        assert (own - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize(("tp", "name"), diagonal([1, 2, 4], ["deepseek_v4-fp8-fp4", "deepseek_v4-fp8"]))
def test_published_checkpoint_equals_its_dequantized_twin(
    name: str, tp: int, make_model: Any, tmp_path: Path
) -> None:
    published = CHECKPOINTS[name]
    source = make_model(published.kind, seed=3, **published.overrides)
    quantized, twin = write_published(source, tmp_path, published)
    prompts = prompts_of(LENGTHS, seed=1)
    found = StateModel(quantized, tp).compute(prompts, CHUNK_LENS, NUM_DECODES)
    for own, theirs in zip(found, StateModel(twin).compute(prompts, CHUNK_LENS, NUM_DECODES), strict=True):
        assert (own - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("qwen3_next", 8, "8 does not divide the 4 value heads of its gated delta net layers"),
        ("bamba", 3, "3 does not divide"),
        ("jamba-dense", 3, "3 does not divide"),
        ("mamba", 3, "3 does not divide the 128 channels of its Mamba layers"),
        ("mamba2", 16, "16 does not divide the 8 heads of its Mamba layers"),
        ("kimi_linear", 16, "16 does not divide"),
        ("minimax-factors", 8, "8 does not divide"),
        ("deepseek_v4", 8, "8 does not divide the 4 groups of its attention heads"),
        ("glm5_next_text", 16, "16 does not divide its attention heads, 8"),
        ("glm5_next_text-one-pool", 8, "8 does not divide the 4 heads of its Kimi delta attention layers"),
    ],
)
def test_ranks_that_do_not_divide_a_layer_are_refused(
    kind: str, size: int, words: str, make_model: Any
) -> None:
    model = describe_model(make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind]), kind)
    with pytest.raises(ConfigError, match=words):
        check_supported(model, size)


def test_ranks_that_divide_groups_of_float4_experts_are_refused(make_model: Any) -> None:
    model = describe_model(
        make_model("deepseek_v4", seed=7, **STATE_KINDS["deepseek_v4"] | {"o_groups": 8}), "it"
    )
    check_supported(model, 8)
    model.hf["quantization_config"] = {"quant_method": "fp8", "expert_dtype": "fp4"}
    with pytest.raises(ConfigError, match="intermediate size of experts, 128, is too small for a tensor_par"):
        check_supported(model, 8)


def test_heads_that_cannot_share_groups_are_refused(make_model: Any) -> None:
    model = describe_model(make_model("bamba", seed=7, **STATE_KINDS["bamba"]), "bamba")
    model.hf["mamba_n_groups"] = 3
    with pytest.raises(ConfigError, match="the 8 heads of its Mamba layers cannot share 3 groups evenly"):
        check_supported(model, 1)


def test_heads_of_mamba_that_ranks_neither_have_whole_nor_share_are_refused(make_model: Any) -> None:
    fields = STATE_KINDS["zamba-one-head"] | {"n_mamba_heads": 6, "num_attention_heads": 4}
    model = describe_model(make_model("zamba", seed=7, **fields), "zamba")
    with pytest.raises(
        ConfigError, match="4 neither divides the 6 heads of its Mamba layers, nor is a multiple"
    ):
        check_supported(model, 4)


def test_each_head_of_mamba_has_a_state_of_its_own(make_model: Any) -> None:
    model = describe_model(make_model("zamba", seed=7, **STATE_KINDS["zamba-four-heads"]), "zamba")
    one, eight = state_layers(model, 1), state_layers(model, 8)
    assert [tensor.shape for tensor in one[0]] == [(3, 128)] + 4 * [(7, 32)]
    assert [tensor.shape for tensor in eight[0]] == [(3, 16), (7, 16)]  # two ranks share a head


def test_state_of_a_sequence_is_divided_among_ranks(make_model: Any) -> None:
    """The convolution has the inputs, and B and C of both groups; a head's state has 16 x 16 numbers in float32."""
    model = describe_model(make_model("bamba", seed=7, **STATE_KINDS["bamba"]), "bamba")
    one, two, four = (state_layers(model, size) for size in (1, 2, 4))
    assert [tensor.shape for tensor in one[0]] == [(3, 128 + 2 * 32), (8, 16, 16)]
    assert state_bytes(one, 2) == 2 * (2 * 3 * 192 + 4 * 8 * 16 * 16)
    assert [tensor.shape for tensor in two[0]] == [(3, 64 + 2 * 16), (4, 16, 16)]
    assert [tensor.shape for tensor in four[0]] == [(3, 32 + 2 * 16), (2, 16, 16)]  # ranks share a group
    assert len(one) == 2


def test_only_layers_with_attention_cache_keys_and_values(make_model: Any) -> None:
    def describe(kind: str) -> Any:
        return describe_model(make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind]), kind)

    assert describe("bamba").kv_layers == ((4, 16),)
    assert describe("falcon_h1").kv_layers == ()  # all layers have attention beside the recurrence
    assert describe("lfm3").kv_layers == ((4, 16),) * 2
    assert describe("lfm3").layer_windows == (0, 9)
    assert describe("mamba").kv_layers == NO_KV
    # A vector per token in windows, and a page of entries.
    compressed = describe("deepseek_v4")
    assert compressed.layer_windows == (9, 9, 9, 0, 0)
    assert compressed.kv_shapes(2) == [(1, 1, 24)] * 5
    # A latent per token of each layer with attention, and a page of pools' keys.
    assert describe("glm5_next_text-shared-choice").kv_shapes(2) == [(1, 1, 48)] * 5
    latent = describe("kimi_linear")
    assert latent.num_kv_layers == 1
    assert latent.kv_shapes(2) == [(1, 1, 64)]
