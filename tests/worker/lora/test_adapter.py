"""Files of adapters: what is read, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.proto.errors import ConfigError
from quire.proto.model.target_modules import TargetModules
from quire.worker.lora.adapter import LoraAdapter, read_adapter
from quire.worker.lora.adapter_config import MAX_CONFIG_BYTES, read_adapter_config
from quire.worker.lora.layers import ExpertStack, LayerFactors, LoraLayers
from quire.worker.weights.weight_slice import WeightSlice

NAME = "model.layers.0.self_attn"
KEY = f"base_model.model.{NAME}"
EMBEDDING = "model.embed_tokens"


def make_layers(rank: int = 0, size: int = 1, targets: tuple[str, ...] = ()) -> LoraLayers:
    """Return a model of one fused layer q, k of [8, 12] and [4, 12], one row-parallel layer of [12, 8], and an
    embedding of 20 tokens.
    """
    layers = LoraLayers(2, 8, torch.float32, torch.device("cpu"), TargetModules(targets))
    layers.add_layer(
        [
            WeightSlice(f"{NAME}.q_proj", (8, 12), 0, rank * 8 // size, 8 // size),
            WeightSlice(f"{NAME}.k_proj", (4, 12), 0, rank * 4 // size, 4 // size),
        ]
    )
    layers.add_layer([WeightSlice(f"{NAME}.o_proj", (12, 8), 1, rank * 8 // size, 8 // size)])
    layers.add_embedding(WeightSlice(EMBEDDING, (12, 20), 1, rank * 20 // size, 20 // size))
    layers.add_layer([WeightSlice("lm_head", (20, 12), 0, rank * 20 // size, 20 // size)])
    return layers


def matrices(rank: int = 4) -> dict[str, Tensor]:
    return {
        f"{KEY}.q_proj.lora_A.weight": torch.randn(rank, 12),
        f"{KEY}.q_proj.lora_B.weight": torch.randn(8, rank),
        f"{KEY}.o_proj.lora_A.weight": torch.randn(rank, 8),
        f"{KEY}.o_proj.lora_B.weight": torch.randn(12, rank),
    }


def of_embedding(num_tokens: int = 20) -> dict[str, Tensor]:
    key = f"base_model.model.{EMBEDDING}"
    return {
        f"{key}.lora_embedding_A": torch.randn(4, num_tokens),
        f"{key}.lora_embedding_B": torch.randn(12, 4),
    }


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> str:
    save_file(matrices() if tensors is None else tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def of_head() -> dict[str, Tensor]:
    key = "base_model.model.lm_head"
    return {f"{key}.lora_A.weight": torch.randn(4, 12), f"{key}.lora_B.weight": torch.randn(20, 4)}


def test_copies_of_the_models_own_head_are_not_read(tmp_path: Path) -> None:
    """PEFT stores the weight and the bias of a head beside its adapter."""
    key = "base_model.model.lm_head.base_layer"
    path = write(
        tmp_path, {**of_head(), f"{key}.weight": torch.randn(20, 12), f"{key}.bias": torch.randn(20)}
    )
    assert [factors is not None for factors in read_adapter(path, make_layers()).factors] == [False] * 3 + [
        True
    ]


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.router", "block_sparse_moe.gate"])
def test_router_is_found_under_transformers_name(name: str, tmp_path: Path) -> None:
    """Mixtral's checkpoints call the block of experts otherwise than transformers and PEFT."""
    layers = make_layers()
    layers.add_layer([WeightSlice("model.layers.0.block_sparse_moe.gate", (4, 12), 0, 0, 4)])
    key = f"base_model.model.model.layers.0.{name}"
    tensors = {f"{key}.lora_A.weight": torch.randn(4, 12), f"{key}.lora_B.weight": torch.randn(4, 4)}
    (*others, router) = read_adapter(write(tmp_path, tensors), layers).factors
    assert router is not None
    assert torch.equal(router.a[0, 0], tensors[f"{key}.lora_A.weight"])
    assert not any(others)


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    tensors = matrices()
    before = read_adapter(write(tmp_path, tensors), make_layers()).digest
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1.0
    assert read_adapter(write(tmp_path, tensors), make_layers()).digest != before


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    tensors = matrices() | of_embedding()
    # PEFT stores the model's own embedding besides.
    path = write(
        tmp_path, {**tensors, f"base_model.model.{EMBEDDING}.base_layer.weight": torch.randn(20, 12)}
    )
    adapters = [read_adapter(path, make_layers(rank, 2)) for rank in range(2)]
    whole = read_adapter(path, make_layers())
    assert {each.digest for each in (*adapters, whole)} == {whole.digest}

    def of_layer(adapter: LoraAdapter, layer: int) -> LayerFactors:
        factors = adapter.factors[layer]
        assert factors is not None
        return factors

    assert all(of_layer(adapter, 0).ranks.tolist() == [[4, 0]] for adapter in adapters)  # k_proj is unchanged
    qk, output = of_layer(adapters[1], 0), of_layer(adapters[1], 1)
    assert torch.equal(qk.a[0, 0], tensors[f"{KEY}.q_proj.lora_A.weight"])
    assert torch.equal(qk.b[0, :, :4], 2 * tensors[f"{KEY}.q_proj.lora_B.weight"][4:].T)
    assert not qk.b[0, :, 4:].any()
    assert torch.equal(output.a[0, 0], tensors[f"{KEY}.o_proj.lora_A.weight"][:, 4:])
    assert torch.equal(output.b, of_layer(whole, 1).b)
    embedding = of_layer(adapters[1], 2)
    assert torch.equal(embedding.a[0, 0], tensors[f"base_model.model.{EMBEDDING}.lora_embedding_A"][:, 10:])
    assert torch.equal(embedding.b[0], 2 * tensors[f"base_model.model.{EMBEDDING}.lora_embedding_B"].T)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"self_attn.q_proj": 12, "o_proj": 1}}, 3.0),
        ({"r": 2, "rank_pattern": {f"{NAME}.q_proj": 4}}, 2.0),
        ({"rank_pattern": {r".*\.q_proj": 8}}, 1.0),  # as PEFT 0.21 writes a pattern
        ({"rank_pattern": {r".*\.proj": 8}}, 2.0),
    ],
)
def test_scaling_follows_alpha_and_rank(config: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    write(tmp_path, **config)
    assert read_adapter_config(tmp_path, 8).scaling_of(f"{NAME}.q_proj") == scaling


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"r": 16}, "r is 16, must be from 1 to 8; see max_lora_rank"),
        ({"r": True}, "r is True"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', must be 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported; must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        ({"rank_pattern": {"(a+)+$": 4}}, "only plain names of modules are supported"),
        ({"rank_pattern": {"q_proj": 99}}, "rank_pattern['q_proj'] is 99"),
        ({"rank_pattern": [1]}, "rank_pattern is [1], must be an object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_config_is_refused_by_name(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write(tmp_path, **config)
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_adapter_config(tmp_path, 8)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"r": 1e999}', "[" * 100_000, '{"a": "' + "x" * MAX_CONFIG_BYTES + '"}']
)
def test_malformed_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config.json|r is inf"):
        read_adapter_config(tmp_path, 8)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in matrices().items() if name not in key}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "has no tensors"),
        ({"weight": torch.zeros(2, 2)}, "tensor 'weight' is not a matrix"),
        (
            {f"{KEY}.q_proj.lora_embedding_{side}": torch.zeros(4, 12) for side in "AB"},
            f"module {NAME}.q_proj is a linear layer, and its matrices are not those of a linear layer",
        ),
        (
            {f"base_model.model.{EMBEDDING}.lora_{side}.weight": torch.zeros(4, 12) for side in "AB"},
            f"module {EMBEDDING} is an embedding, and its matrices are not",
        ),
        (of_embedding(num_tokens=21), "has shape [4, 21], must have [4, 20]"),
        (
            {**of_embedding(), f"base_model.model.{EMBEDDING}.base_layer.weight": torch.zeros(21, 12)},
            f"it has a weight of {EMBEDDING} of its own, of shape [21, 12]",
        ),
        (
            {**of_head(), "base_model.model.lm_head.base_layer.bias": torch.zeros(21)},
            "it has a bias of lm_head of its own, of shape [21]",
        ),
        ({**matrices(), f"{KEY}.q_proj.lora_magnitude_vector.weight": torch.zeros(8)}, "is not a matrix"),
        (
            {f"{KEY}.q_proj.lora_A.weight": torch.zeros(4, 12, dtype=torch.int8)},
            "must be a floating-point type",
        ),
        (
            {
                "base_model.model.head.lora_A.weight": torch.zeros(4, 12),
                "base_model.model.head.lora_B.weight": torch.zeros(20, 4),
            },
            "it changes head; adapters of this",
        ),
        (without("q_proj.lora_B"), "without its partner"),
        (matrices(rank=3), "has shape [3, 12], must have [4, 12]"),
        ({**matrices(), f"{KEY}.o_proj.lora_B.weight": torch.zeros(11, 4)}, "must have [12, 4]"),
        ({**matrices(), f"{KEY}.q_proj.lora_B.weight": torch.full((8, 4), float("nan"))}, "not finite"),
    ],
    ids=range(14),
)
def test_unfit_tensors_are_refused_by_name(tensors: dict[str, Tensor], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, tensors)
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_adapter(path, make_layers())


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (("q_proj", "o_proj"), None),
        (("self_attn",), None),
        (
            ("q_proj",),
            f"it changes {NAME}.o_proj; adapters of this model may change its layers' q_proj; see lora_",
        ),
        # A part of a fused layer whose other part may be changed.
        (("k_proj", "o_proj"), f"it changes {NAME}.q_proj; adapters of this"),
        (("proj",), "may change its layers' ; see lora_target_modules"),
    ],
)
def test_adapter_of_other_modules_than_targets_is_refused_by_name(
    targets: tuple[str, ...], problem: str | None, tmp_path: Path
) -> None:
    path, layers = write(tmp_path), make_layers(targets=targets)
    if problem is None:
        assert any(read_adapter(path, layers).factors)
    else:
        with pytest.raises(ValueError, match=re.escape(problem)):
            read_adapter(path, layers)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("experts", ["gate_up_proj", "down_proj"]),
        ("gate_up_proj", ["gate_up_proj"]),
        ("mlp.experts.1", ["gate_up_proj", "down_proj"]),
        ("down_proj", ["down_proj"]),
        ("q_proj", []),
    ],
)
def test_targets_choose_layers_of_experts(target: str, names: list[str]) -> None:
    layers = make_experts(targets=(target,))
    assert [layer.stack.name for layer in layers if layer.stack is not None] == names
    assert bool(layers.modules) == bool(names)
    if names:
        layers.check_targets()
    else:
        with pytest.raises(
            ConfigError, match="lora_target_modules has q_proj, which is no module of this model"
        ):
            layers.check_targets()
    assert layers.slot_bytes == sum(layer.factors.num_bytes for layer in layers) // 2


def test_adapter_of_tied_embedding_and_head_must_have_both(tmp_path: Path) -> None:
    path = write(tmp_path, of_embedding(), ensure_weight_tying=True)
    with pytest.raises(ValueError, match=f"ensure_weight_tying is True, and it changes {EMBEDDING} alone"):
        read_adapter(path, make_layers())


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"it has no adapter_model.safetensors; other formats are not read"):
        read_adapter(str(tmp_path), make_layers())


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="ends beyond the file"):
        read_adapter(path, make_layers())


STACK = "model.layers.0.mlp.experts"


def make_experts(
    inner: int = 6, hidden: int = 12, rank: int = 0, size: int = 1, targets: tuple[str, ...] = ()
) -> LoraLayers:
    """Return a model of a mixture of three experts, sharded over the ranks."""
    layers = LoraLayers(2, 8, torch.float32, torch.device("cpu"), TargetModules(targets))
    length = inner // size
    for name, parts in (
        ("gate_up_proj", [("gate_proj", (inner, hidden), 0), ("up_proj", (inner, hidden), 0)]),
        ("down_proj", [("down_proj", (hidden, inner), 1)]),
    ):
        experts = [
            [
                WeightSlice(f"{STACK}.{index}.{part}", shape, dim, rank * length, length)
                for part, shape, dim in parts
            ]
            for index in range(3)
        ]
        layers.add_experts(experts, ExpertStack(STACK, name, 3))
    return layers


def stacked(module: str, inputs: int, outputs: int, count: int = 3) -> dict[str, Tensor]:
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(4 * count, inputs),
        f"base_model.model.{module}.lora_B.weight": torch.randn(outputs, 4 * count),
    }


def test_ranks_read_their_parts_of_stacked_experts(tmp_path: Path) -> None:
    """Experts that are stored together are read as those that are stored one by one."""
    tensors = {**stacked(f"{STACK}.base_layer", 12, 12), **stacked(STACK, 6, 12)}
    path = write(tmp_path, tensors, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    single, found = {}, []
    for name, key, outputs in (
        ("gate", ".base_layer", (0, 6)),
        ("up", ".base_layer", (6, 12)),
        ("down", "", (0, 12)),
    ):
        a, b = (tensors[f"base_model.model.{STACK}{key}.lora_{side}.weight"] for side in "AB")
        for index in range(3):
            own = f"base_model.model.{STACK}.{index}.{name}_proj"
            single[f"{own}.lora_A.weight"] = a[4 * index : 4 * index + 4]
            single[f"{own}.lora_B.weight"] = b[slice(*outputs), index::3]
    (tmp_path / "single").mkdir()
    other = write(tmp_path / "single", {name: each.clone().contiguous() for name, each in single.items()})
    for rank in range(2):
        layers = make_experts(rank=rank, size=2)
        for mine, expected in zip(
            read_adapter(path, layers).factors, read_adapter(other, layers).factors, strict=True
        ):
            assert mine is not None
            assert expected is not None
            assert torch.equal(mine.a.expand_as(expected.a), expected.a)
            assert torch.equal(mine.b, expected.b)
            assert torch.equal(mine.ranks, expected.ranks)
            found.append(mine)
    assert not torch.equal(found[0].b, found[2].b)


@pytest.mark.parametrize(
    ("tensors", "inner", "problem"),
    [
        (stacked(STACK, 6, 13), 6, f"it changes {STACK}; adapters of this model"),
        (stacked(STACK, 6, 12, count=2), 6, "has shape [8, 6], must have [12, 6]"),
        (stacked(STACK, 12, 12), 12, f"the shapes of {STACK} do not tell inputs from outputs"),
        ({**stacked(f"{STACK}.base_layer", 12, 24), **stacked(STACK, 12, 12)}, 12, ""),
    ],
    ids=["shape", "count", "square", "square beside another"],
)
def test_stacked_experts_of_unclear_shapes_are_refused(
    tensors: dict[str, Tensor], inner: int, problem: str, tmp_path: Path
) -> None:
    path, layers = write(tmp_path, tensors), make_experts(inner)
    if problem:
        with pytest.raises(ValueError, match=re.escape(problem)):
            read_adapter(path, layers)
    else:
        assert all(factors is not None for factors in read_adapter(path, layers).factors)
