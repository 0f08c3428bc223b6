"""Weights counted from the configuration, against the checkpoint's own tensors and the bytes that are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_checkpoints import CHECKPOINTS, write_published
from quantized_models import SCHEMES, write_quantized
from safetensors import safe_open
from state_kinds import STATE_KINDS

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_source import describe_files
from quire.kernels.linear import PackedHeads, PackedWeight
from quire.worker.models.layers import RotaryTable
from quire.worker.models.weight_size import WeightSize, make_meta_model, measure_weights


def numbers_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                count = 1
                for length in file.get_slice(name).get_shape():
                    count *= length
                total += count
    return total


def measure(folder: Path, dtype_bytes: int) -> WeightSize:
    model = describe_files(EngineOptions(str(folder)))
    return measure_weights(model, make_meta_model(model), dtype_bytes)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "mixtral", "gemma2", "phi3", "lfm2", "qwen3_next", "bamba", "jamba"]
)
def test_size_is_that_of_the_checkpoint(make_model: Callable[..., Path], kind: str) -> None:
    folder = make_model(kind, **STATE_KINDS.get(kind, {}))
    size = measure(folder, 4)
    assert size.num_parameters == numbers_in(folder)
    assert size.num_bytes == 4 * size.num_parameters


_ALIGNED_QWEN4 = {
    "hc_lowrank": 64,
    "indexer_n_heads": 15,
    "indexer_head_dim": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 4,
    "ngram_vocab_size_base": 500,
}


# The packed layers of a CPU have multiples of 64 outputs.
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mimo_v2_flash", {"head_dim": 32, "v_head_dim": 32}),
        ("mistral4", {}),
        ("longcat_flash", {}),
        ("axk2", {"gated_norm_rank": 64, "index_head_dim": 64}),
        ("gemma4_unified_text", {}),
        ("qwen4_exp_text", STATE_KINDS["qwen4_exp_text"] | _ALIGNED_QWEN4),
        ("glm5_next_text", {"moe_intermediate_size": 64, "index_head_dim": 32}),
    ],
)
def test_size_is_that_of_the_loaded_model(
    kind: str, fields: dict[str, Any], make_model: Callable[..., Path], loaded_bytes: Callable[..., int]
) -> None:
    """Checkpoints may have more: LongCat's have matrices of experts that compute nothing."""
    folder = make_model(kind, seed=7, **STATE_KINDS.get(kind, {}) | fields)
    check(folder, loaded_bytes(folder))


def test_weights_need_not_be_there(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = (make_model("llama") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert measure(tmp_path, 2).num_bytes == measure(make_model("llama"), 2).num_bytes


def tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object and of all that it refers to within quire, but for computed tables."""
    if id(value) in seen or isinstance(value, RotaryTable):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for own in value.values():
            yield from tensors_in(own, seen)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from tensors_in(own, seen)
    elif type(value).__module__.startswith("quire.") or isinstance(value, torch.nn.Module):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        for name in names:
            yield from tensors_in(getattr(value, name, None), seen)


@pytest.fixture
def loaded_bytes(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """`loaded_bytes(folder)`: of a model whose quantized layers keep their codes, as on a GPU."""
    monkeypatch.setattr("quire.worker.weights.linear_weight.has_quantized_kernel", lambda weight: True)
    # Nor does a GPU pad outputs, which are few in routers and heads of such small models.
    for module in (
        "moe.expert_routing", "moe.moe", "mixers.indexer", "mixers.pooled_mla", "mixers.compressed",
        "gemma.gemma4", "hyper_connections",
    ):  # fmt: skip
        monkeypatch.setattr(f"quire.worker.models.{module}.pack", PackedWeight)
    monkeypatch.setattr(
        "quire.kernels.latent_attention.pack_heads", lambda weight: PackedHeads(weight, tuple(weight.shape))
    )

    def load(folder: Path, **settings: Any) -> int:
        (runner,) = make_engine(folder, **settings).runners
        model = runner.memory.loaded.model
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_in(model, set())
        }
        return sum(storages.values())

    return load


def check(folder: Path, expected: int, dtype_bytes: int = 4) -> None:
    found = measure(folder, dtype_bytes).num_bytes
    assert found == pytest.approx(expected, rel=0.02), f"{found} of {expected}"


# Layers that the tools of a format leave in full precision |-> how its configuration names them.
LEFT: dict[str, dict[str, Any]] = {
    "gptq": {"dynamic": {r"-:.*\.layers\.1\..*": {}}},
    "awq": {"modules_to_not_convert": ["model.layers.1."]},
    "packed": {"ignore": ["lm_head", r"re:.*layers\.1\..*"]},
    "codes": {"ignore": ["lm_head", "model.layers.1.self_attn", "model.layers.1.mlp.gate_proj"]},
    "nvfp4": {"ignore": ["lm_head", r"re:model\.layers\.1\..*"]},
    "mxfp4": {"ignore": ["lm_head", r"re:.*layers\.1\..*"]},
    "float8": {"modules_to_not_convert": ["model.layers.1", "lm_head"]},
    "modelopt": {"ignore": ["lm_head", "model.layers.1.*"]},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_size_is_that_of_the_loaded_layers_of_each_format(
    scheme: str, make_model: Any, loaded_bytes: Callable[[Path], int], tmp_path: Path
) -> None:
    source = make_model("llama", hidden_size=128, intermediate_size=192, head_dim=16)
    folder, _ = write_quantized(source, tmp_path, SCHEMES[scheme])
    if scheme == "some-layers-left":
        edit_quantization(folder, {"modules_to_not_convert": ["layers.1.", "k_proj", "down_proj"]})
    check(folder, loaded_bytes(folder))


@pytest.mark.parametrize("layout", LEFT)
def test_layers_that_a_format_leaves_count_in_full_precision(
    layout: str, make_model: Any, loaded_bytes: Callable[[Path], int], tmp_path: Path
) -> None:
    """A third of the layers is left: fit would show half of the bytes if it counted them as quantized."""
    scheme = next(each for each in SCHEMES.values() if each.layout == layout)
    ignored = r"layers\.1\.(self_attn|mlp\.gate_proj)" if layout == "codes" else r"layers\.1\."
    folder, _ = write_quantized(make_model("llama"), tmp_path, replace(scheme, ignored=ignored))
    before = measure(folder, 4).num_bytes
    edit_quantization(folder, LEFT[layout])
    check(folder, loaded_bytes(folder))
    assert before < 0.9 * measure(folder, 4).num_bytes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_size_of_published_checkpoint_is_that_of_the_loaded_layers(
    name: str, make_model: Any, loaded_bytes: Callable[[Path], int], tmp_path: Path
) -> None:
    published = CHECKPOINTS[name]
    source = make_model(published.kind, seed=3, **published.overrides)
    folder, _ = write_published(source, tmp_path, published)
    check(folder, loaded_bytes(folder))


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_size_of_online_quantization_is_that_of_the_loaded_layers(
    method: str, make_model: Any, loaded_bytes: Callable[..., int]
) -> None:
    folder = make_model("llama")
    model = replace(describe_files(EngineOptions(str(folder))), quantization=method)
    found = measure_weights(model, make_meta_model(model), 4).num_bytes
    assert found == pytest.approx(loaded_bytes(folder, quantization=method), rel=0.015)


def edit_quantization(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_rank_with_whole_experts_has_the_larger_part_of_uneven_ones(make_model: Callable[..., Path]) -> None:
    folder = make_model("qwen3_moe")  # 6 experts, of three matrices [48, 64], in each of 3 layers
    size = measure(folder, 4)
    assert size.routed_bytes == 4 * 3 * 6 * 3 * 48 * 64
    sliced, whole = size.rank_bytes(4), size.rank_bytes(4, 6)
    assert sliced == size.num_bytes // 4
    assert whole - sliced == size.routed_bytes // 12  # two of six, not a quarter
    assert size.rank_bytes(2, 6) == size.rank_bytes(2)


def test_rank_that_sends_tokens_to_experts_has_whole_networks_besides(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    config = json.loads((folder / "config.json").read_text())
    size, matrix = measure(folder, 4), 4 * config["hidden_size"]
    assert size.dense_bytes == 3 * matrix * config["intermediate_size"]
    width = config["moe_intermediate_size"] * config["n_shared_experts"]
    assert size.shared_expert_bytes == 2 * 3 * matrix * width
    num_experts = config["n_routed_experts"]
    summed, sent = size.rank_bytes(2, num_experts), size.rank_bytes(2, num_experts, sends_tokens=True)
    assert sent - summed == pytest.approx(size.shared_expert_bytes / 2, abs=1)
    summed = size.rank_bytes(2, num_experts, attention_ranks=1)
    sent = size.rank_bytes(2, num_experts, attention_ranks=1, sends_tokens=True)
    assert sent - summed == pytest.approx((size.shared_expert_bytes + size.dense_bytes) / 2, abs=1)
    alone, in_pairs = (
        size.rank_bytes(4, num_experts, attention_ranks=each, sends_tokens=True) for each in (1, 2)
    )
    assert alone - in_pairs == pytest.approx((size.attention_bytes + size.dense_bytes) / 2, abs=1)


def test_rank_with_whole_attention_has_the_expansion_of_latents_dequantized(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((make_model("deepseek_v3") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = measure(tmp_path, 2)
    heads, latents = config["num_attention_heads"], config["kv_lora_rank"]
    dims = config["qk_nope_head_dim"] + config["v_head_dim"]
    expansion = 2 * config["num_hidden_layers"] * heads * dims * latents
    assert expansion < size.attention_bytes < 2.1 * expansion  # the rest is in float8
    shared, whole = size.rank_bytes(2), size.rank_bytes(2, attention_ranks=1)
    assert whole - shared == pytest.approx(size.attention_bytes / 2, abs=1)
